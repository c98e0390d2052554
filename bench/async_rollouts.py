"""Training steps per hour when answers are written while the trainer trains, against taking turns.

    python bench/async_rollouts.py [--steps 40] [--batch 32] [--sigma 1.0] [--train-s 60]

The real stream, staleness gate, manager and ledger run over a simulated engine and a simulated
trainer on a simulated clock, so that neither this machine's speed nor its load matters. Answer
lengths are log-normal (median 1,000 tokens, at most 16,384); every running request gets its next
token after 10 ms, and later the more requests run; the same sample has the same length in every
row. A training step takes `--train-s` seconds and a weight update 2. Every row has the same engine
and the same trainer; in the first one they take turns.

What happens to requests that are running when weights change:

    keep      they go on under the new weights (partial rollout; `weights.pause_mode: in_place`)
    drain     the update waits until they have ended; no new ones start meanwhile
    restart   they are thrown away and begin again

`wasted`: tokens thrown away, as a share of all generated. `age`: weight versions between the oldest
token of an answer and the weights trained with it; the bound must hold. `bias`: mean length of what
was trained divided by that of what was issued (`rollout/length_bias`), after a quarter of the steps
and at the end; 1 is none.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from long_tail import CAP, FULL_SPEED, GROUP_SIZE, TOKEN_S, TOKENS_PER_TICK, SimulatedLoop
from long_tail import SimulatedEngine as LongTailEngine

from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.sampling import SamplingConfig
from rollmill.data.ledger import Ledger
from rollmill.data.loading import Dataset, Part
from rollmill.data.prompts import PromptRow
from rollmill.data.source import PromptSource
from rollmill.engine.types import FinishReason, GenerateResult, VersionSpan
from rollmill.filters import DynamicFilter
from rollmill.rollout.group import GroupRunner
from rollmill.rollout.hooks import LoadedHooks, generate_overrides
from rollmill.rollout.manager import RolloutManager, RolloutParts
from rollmill.rollout.streaming import StreamingManager
from rollmill.sample import EngineCounters, Status, float_array, int_array
from rollmill.testing import make_context

SYNC_S = 2.0
Mode = Literal["keep", "drain", "restart"]


class SimulatedEngine(LongTailEngine):
    """Continuous batching without a model, whose weights change while requests run."""

    def __init__(self, sigma: float, mode: Mode) -> None:
        super().__init__(sigma)
        self.mode = mode
        self.num_generated = 0
        self.num_restarts = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_idle = asyncio.Event()

    async def update(self, version: int) -> None:
        """New weights, as a weight sync brings them."""
        self._is_open.clear()
        if self.mode == "drain":
            while self.num_running:
                self._is_idle.clear()
                await self._is_idle.wait()
        if self.mode == "restart":
            self.num_restarts += 1
        await asyncio.sleep(SYNC_S)
        self.version = version
        self._is_open.set()

    async def generate(
        self, rid: str, input_ids: Any, sampling: dict[str, Any], **_: Any
    ) -> GenerateResult:
        await self._is_open.wait()
        wanted, done, restarts = self.length(rid), 0, self.num_restarts
        spans: list[VersionSpan] = []
        self.num_running += 1
        try:
            while done < wanted and restarts == self.num_restarts:
                tick = min(TOKENS_PER_TICK, wanted - done)
                version = self.version
                await asyncio.sleep(tick * TOKEN_S * (1 + self.num_running / FULL_SPEED))
                spans.append(VersionSpan(version, done, done + tick))
                done += tick
                if self.mode != "drain":
                    await self._is_open.wait()
        finally:
            self.num_running -= 1
            self._is_idle.set()
        self.num_generated += done
        finish = FinishReason.LENGTH if wanted >= CAP else FinishReason.STOP
        return GenerateResult(
            token_ids=int_array(np.full(done, 5)),
            log_probs=float_array(np.full(done, -0.5)),
            spans=tuple(merged(spans)),
            finish=finish if done == wanted else FinishReason.ABORT,
            text="x",
            counters=EngineCounters(num_calls=1),
        )


def merged(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Neighbours of one version as one span."""
    result: list[VersionSpan] = []
    for span in spans:
        if result and result[-1].version == span.version:
            span = VersionSpan(span.version, result.pop().start, span.end)
        result.append(span)
    return result


async def generate(sample: Any, context: Any) -> Any:
    """One answer; begun again when it was stopped half way."""
    await context.extend(sample)
    while sample.status is Status.ABORTED:
        sample.restart()
        await context.extend(sample)
    sample.reward = float(sample.attempt % 2)
    return sample


@contextmanager
def manager_for(
    engine: SimulatedEngine, staleness: int | None, steps: int, batch: int, folder: Path
) -> Iterator[RolloutManager]:
    """The real rollout side; `staleness` of None takes turns with the trainer."""
    sampling = SamplingConfig(max_new_tokens=CAP)
    config = RolloutConfig.model_validate(
        {
            "batch_size": batch,
            "n_samples_per_prompt": GROUP_SIZE,
            "asynchronous": staleness is not None,
            "max_staleness": staleness or 0,
            "sampling": sampling.model_dump(),
        }
    )
    rows = tuple(PromptRow(f"prompt {i}", int_array([3])) for i in range(steps * batch + batch))
    source = PromptSource(Dataset((Part("all", rows),)), n_samples_per_prompt=GROUP_SIZE)
    context = make_context(
        engine, sampling=sampling, context_length=CAP + 1, max_requests=10 * batch * GROUP_SIZE
    )
    runner = GroupRunner(
        generate=generate,
        overrides=generate_overrides(folder),
        context=replace(context, new_index=source.new_index),
        judge=None,  # type: ignore[arg-type]  # rewards are set while generating
        reward=RewardConfig(type="math"),
        max_retries=0,
    )
    ledger = Ledger(folder / "ledger.sqlite")
    parts = RolloutParts(
        source=source,
        ledger=ledger,
        runner=runner,
        dynamic_filter=DynamicFilter(config.filters, reward_key=None, base_dir=folder),
        ranking=None,
        hooks=LoadedHooks(generate=generate),
        reward_key=None,
    )
    if staleness is None:
        yield RolloutManager(config, parts)
    else:
        yield StreamingManager(config, parts, last_step=steps)
    ledger.close()


@dataclass
class Row:
    """What a run of one kind gave."""

    seconds: float = 0.0
    num_trained: int = 0
    num_generated: int = 0
    mean_age: float = 0.0
    max_age: float = 0.0
    early_bias: float = 1.0
    last_bias: float = 1.0

    @property
    def wasted(self) -> float:
        """Share of generated tokens that no step trained on."""
        return 1 - self.num_trained / self.num_generated


def measure(
    staleness: int | None, mode: Mode, *, steps: int, batch: int, sigma: float, train_s: float
) -> Row:
    """Train for `steps` steps of simulated time."""

    async def main() -> Row:
        engine, row = SimulatedEngine(sigma, mode), Row()
        with (
            tempfile.TemporaryDirectory() as folder,
            manager_for(engine, staleness, steps, batch, Path(folder)) as manager,
        ):
            for step in range(1, steps + 1):
                result = await manager.collect(step=step, version=step - 1)
                await asyncio.sleep(train_s)
                manager.consumed(result, step)
                await engine.update(step)
                manager.weights_changed(step)
                note(row, result.metrics, steps, is_early=step <= max(1, steps // 4))
            row.seconds = asyncio.get_running_loop().time()
            row.num_generated = engine.num_generated
            await manager.close()
        return row

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main())


def note(row: Row, metrics: dict[str, float], steps: int, *, is_early: bool) -> None:
    """Add one step's figures."""
    row.num_trained += round(metrics["rollout/response_tokens"])
    row.mean_age += metrics["rollout/staleness_mean"] / steps
    row.max_age = max(row.max_age, metrics["rollout/staleness_max"])
    row.last_bias = metrics.get("rollout/length_bias", 1.0)
    if is_early:
        row.early_bias = row.last_bias


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--train-s", type=float, default=60.0)
    options = vars(parser.parse_args())
    print(
        "{steps} steps of {batch} groups, sigma {sigma:g}, training {train_s:g} s".format(**options)
    )
    print(f"{'S':>11} {'running':<9}{'steps/h':>8}{'ratio':>7}{'wasted':>8}"
          f"{'mean age':>10}{'max':>5}{'bias early':>12}{'end':>7}")  # fmt: skip
    in_turns = None
    rows: list[tuple[int | None, Mode]] = [(None, "keep"), (0, "keep")]
    rows += [(s, mode) for s in (1, 2, 4) for mode in ("keep", "drain", "restart")]
    for staleness, mode in rows:
        row = measure(staleness, mode, **options)
        in_turns = in_turns or row
        if row.max_age > (staleness or 0):
            raise SystemExit(f"S = {staleness}: an answer {row.max_age:g} versions old was trained")
        print(
            f"{'in turns' if staleness is None else staleness:>11} {mode:<9}"
            f"{3600 * options['steps'] / row.seconds:>8.1f}{in_turns.seconds / row.seconds:>7.2f}"
            f"{row.wasted:>8.1%}{row.mean_age:>10.2f}{row.max_age:>5.0f}"
            f"{row.early_bias:>12.3f}{row.last_bias:>7.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
