"""A whole rollout side in one process: source, ledger, runner and manager over given engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_script import Script
from scripted_engine import ScriptedEngine

from rollmill.config.engine import EngineConfig
from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.sampling import SamplingConfig
from rollmill.data.ledger import Ledger, State
from rollmill.data.loading import Dataset, Part
from rollmill.data.prompts import PromptRow
from rollmill.data.source import PromptSource
from rollmill.engine.pool import EnginePool
from rollmill.filters import DynamicFilter, load_ranking
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.group import GroupRunner
from rollmill.rollout.hooks import LoadedHooks, generate_overrides
from rollmill.rollout.manager import RolloutManager, RolloutParts
from rollmill.rollout.streaming import StreamingManager
from rollmill.sample import Group, Sample, int_array
from rollmill.telemetry.progress import Progress
from rollmill.testing import FakeEngines, make_context
from rollmill.testing.fakes import FakeCall


class LengthJudge:
    """A judge that needs no processes: the reward is 1 for answers of even length, else 0.

    `hold()` makes judging hang until `release()`; `score` replaces the reward.
    """

    def __init__(self, score: Callable[[Sample], float] | None = None) -> None:
        self.score = score or (lambda sample: float(sample.response_length % 2 == 0))
        self.num_judged = 0
        self.num_waiting = 0
        self.num_cancelled = 0
        self._gate = asyncio.Event()
        self._gate.set()

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    async def judge(self, sample: Sample) -> Outcome:
        self.num_waiting += 1
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_waiting -= 1
        self.num_judged += 1
        return Outcome(OutcomeKind.VALUE, self.score(sample))

    async def judge_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [await self.judge(sample) for sample in samples]


class SlowRows(FakeEngines):
    """Engines that answer some rows only when aborted."""

    def __init__(self, rows: set[int], length: int = 8) -> None:
        super().__init__(length)
        self.rows = rows

    async def generate(self, rid: str, input_ids: Any, sampling: Any, **options: Any) -> Any:
        if int(input_ids[0]) - 100 not in self.rows:
            return await super().generate(rid, input_ids, sampling, **options)
        aborts = self._num_aborts
        self.num_running += 1
        self._notify()
        try:
            while aborts == self._num_aborts:
                await self._changed.wait()
        finally:
            self.num_running -= 1
        self.calls.append(FakeCall(rid, tuple(int(t) for t in input_ids), dict(sampling)))
        return self._answer(self.calls[-1], is_aborted=True)


def make_source(num_prompts: int = 64, n: int = 2, **options: Any) -> PromptSource:
    rows = [
        PromptRow(f"prompt {i}", int_array([100 + i, 7, 8]), f"label {i}", {"row": i})
        for i in range(num_prompts)
    ]
    dataset = Dataset((Part("made up", tuple(rows)),))
    return PromptSource(dataset, n_samples_per_prompt=n, shuffle=False, **options)


@dataclass
class Side:
    """The rollout side of a run, and what it did."""

    manager: RolloutManager
    source: PromptSource
    ledger: Ledger
    context: GenerateContext
    judge: Any
    progress: list[Progress] = field(default_factory=list)
    step: int = 0
    trained: list[Group] = field(default_factory=list)

    async def collect(self, version: int | None = None) -> RolloutBatch:
        self.step += 1
        version = self.step - 1 if version is None else version
        return await self.manager.collect(step=self.step, version=version)

    async def train(self, version: int | None = None) -> RolloutBatch:
        batch = await self.collect(version)
        self.manager.consumed(batch, self.step)
        self.trained += batch.groups
        return batch

    def check_books(self) -> None:
        """Every group that was issued is in one state, and it is the one that memory says."""
        balance = self.ledger.balance()
        live = self.ledger.live()
        states = [self.ledger.state_of(index) for index in range(self.source._next_group)]
        assert None not in states
        assert sum(balance.values()) == self.source._next_group
        assert {s: states.count(s) for s in State} == balance
        assert balance[State.IN_FLIGHT] == 0
        at_source = [i for i, s in live.items() if s in (State.ISSUED, State.WAITING)]
        assert sorted(at_source) == sorted(self.source._waiting)
        ready = [i for i, s in live.items() if s is State.READY]
        assert sorted(ready) == sorted(group.group_index for group in self.manager._ready)


def make_side(
    tmp_path: Path,
    engines: Any,
    *,
    config: dict[str, Any] | None = None,
    reward: RewardConfig | None = None,
    hooks: LoadedHooks | None = None,
    judge: Any = None,
    source: Any = None,
    num_prompts: int = 64,
    max_requests: int = 64,
    max_new_tokens: int = 64,
    last_step: int | None = None,
) -> Side:
    settings = {"batch_size": 4, "n_samples_per_prompt": 2, "abort_timeout_s": 2.0} | (config or {})
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    rollout = RolloutConfig.model_validate({"sampling": sampling.model_dump()} | settings)
    source = source or make_source(num_prompts, rollout.n_samples_per_prompt)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    context = make_context(engines, sampling=sampling, max_requests=max_requests)
    hooks = hooks or LoadedHooks()
    judge = judge or LengthJudge()
    runner = GroupRunner(
        generate=hooks.generate,
        overrides=generate_overrides(tmp_path),
        context=context,
        judge=judge,
        reward=reward or RewardConfig(type="math"),
        max_retries=rollout.max_attempt_retries,
        sample_hook=hooks.sample,
    )
    parts = RolloutParts(
        source=source,
        ledger=ledger,
        runner=runner,
        dynamic_filter=DynamicFilter(rollout.filters, reward_key=None, base_dir=tmp_path),
        ranking=load_ranking(rollout.filters.over_sampling, reward_key=None, base_dir=tmp_path),
        hooks=hooks,
        reward_key=None,
    )
    progress: list[Progress] = []
    manager = (
        StreamingManager(rollout, parts, progress.append, last_step=last_step)
        if rollout.asynchronous
        else RolloutManager(rollout, parts, progress.append)
    )
    return Side(manager, source, ledger, context, judge, progress)


@asynccontextmanager
async def scripted(
    script: Script, tmp_path: Path, **config: Any
) -> AsyncIterator[tuple[ScriptedEngine, EnginePool]]:
    """A scripted engine behind a real engine pool, over a socket."""
    async with ScriptedEngine(script) as engine:
        settings = EngineConfig(urls=(engine.url,), **({"request_timeout_s": 20.0} | config))
        async with EnginePool(settings, model_path="none", run_dir=tmp_path) as pool:
            yield engine, pool


def run(main: Callable[[], Any], limit_s: float = 30.0) -> Any:
    """Run a coroutine function to its end; nothing may be left running after it."""

    async def limited() -> Any:
        async with asyncio.timeout(limit_s):
            result = await main()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [t for t in left if t.get_name().startswith("group")], left
        return result

    return asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run, turn by turn, until the condition holds."""
    while not condition():  # noqa: ASYNC110 - there is no event for what tests look at
        await asyncio.sleep(0)
