"""Time to 20 batches when a few answers are much longer than the others, and tokens thrown away.

    python bench/long_tail.py [--steps 20] [--batch 32] [--over 1.5]

The real rollout manager, collector, gate and ledger run over a simulated engine on a simulated
clock: answer lengths are log-normal (median 1,000 tokens, sigma 1.0 and 1.4, at most 16,384), every
running request gets its next token after 10 ms, and a little later the more requests run. Four ways
to collect are compared; the same sample has the same length in all of them. Tokens are wasted when
no batch and no later step sees them; "finished" are those of answers that were complete.

    plain             ask for one batch and wait for all of it
    discard           ask for more, take the first that finish, throw the surplus away
    surplus reuse     finished answers feed later batches, unfinished ones start afresh
    partial rollout   finished answers feed later batches, unfinished ones are gone on with
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import selectors
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

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
from rollmill.sample import EngineCounters, float_array, int_array
from rollmill.testing import make_context

GROUP_SIZE = 8
MEDIAN, CAP = 1000, 16_384
TOKEN_S = 0.01
FULL_SPEED = 512
"""Running requests at which a token takes twice as long as alone."""
TOKENS_PER_TICK = 64


class _NoWaiting(selectors.SelectSelector):
    """Instead of waiting, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that will never come")
        self.now += max(0.0, timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _NoWaiting()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual.now


class SimulatedEngine:
    """Continuous batching without a model."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.version = 0
        self.num_running = 0
        self.num_aborts = 0

    def length(self, rid: str) -> int:
        index = rid.split("/")[1]
        draw = random.Random(f"{self.sigma}/{index}").lognormvariate(math.log(MEDIAN), self.sigma)
        return max(1, min(CAP, round(draw)))

    async def generate(
        self, rid: str, input_ids: Any, sampling: dict[str, Any], **_: Any
    ) -> GenerateResult:
        before = len(input_ids) - 1
        left = self.length(rid) - before
        done, aborts = 0, self.num_aborts
        self.num_running += 1
        try:
            while done < left and aborts == self.num_aborts:
                tick = min(TOKENS_PER_TICK, left - done)
                await asyncio.sleep(tick * TOKEN_S * (1 + self.num_running / FULL_SPEED))
                done += tick
        finally:
            self.num_running -= 1
        is_cut = before + done >= CAP
        finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
        return GenerateResult(
            token_ids=int_array(np.full(done, 5)),
            log_probs=float_array(np.full(done, -0.5)),
            spans=(VersionSpan(self.version, 0, done),) if done else (),
            finish=finish if done >= left else FinishReason.ABORT,
            text="x",
            counters=EngineCounters(num_calls=1),
        )

    async def abort_all(self, deadline_s: float) -> None:
        self.num_aborts += 1


@dataclass(frozen=True)
class Way:
    name: str
    over: bool
    partial: bool
    max_staleness: int


WAYS = (
    Way("plain", over=False, partial=False, max_staleness=0),
    Way("discard", over=True, partial=False, max_staleness=0),
    Way("surplus reuse", over=True, partial=False, max_staleness=40),
    Way("partial rollout", over=True, partial=True, max_staleness=40),
)


class Answers:
    """The generate function, which also counts finished answers that are asked for again."""

    def __init__(self) -> None:
        self.num_wasted = 0
        self._finished: dict[tuple[int, int], int] = {}

    async def generate(self, sample: Any, context: Any) -> Any:
        attempt = (sample.group_index, sample.attempt)
        self.num_wasted += self._finished.pop(attempt, 0)
        await context.extend(sample)
        if sample.status.is_finished:
            sample.reward = 1.0
            self._finished[attempt] = sample.response_length
        return sample


@contextmanager
def manager_for(
    way: Way, engine: SimulatedEngine, answers: Answers, batch: int, over: float, folder: Path
) -> Iterator[RolloutManager]:
    sampling = SamplingConfig(max_new_tokens=CAP)
    config = RolloutConfig.model_validate(
        {
            "batch_size": batch,
            "over_sampling_batch_size": round(batch * over) if way.over else None,
            "n_samples_per_prompt": GROUP_SIZE,
            "partial_rollout": way.partial,
            "max_staleness": way.max_staleness,
            "sampling": sampling.model_dump(),
        }
    )
    rows = tuple(PromptRow(f"prompt {i}", int_array([3])) for i in range(100_000 // GROUP_SIZE))
    source = PromptSource(Dataset((Part("all", rows),)), n_samples_per_prompt=GROUP_SIZE)

    context = make_context(engine, sampling=sampling, context_length=CAP + 1, max_requests=4096)
    runner = GroupRunner(
        generate=answers.generate,
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
        hooks=LoadedHooks(generate=answers.generate),
        reward_key=None,
    )
    yield RolloutManager(config, parts)
    ledger.close()


@dataclass
class Row:
    seconds: float = 0
    generated: float = 0
    wasted: float = 0
    wasted_finished: float = 0
    mean_length: float = 0
    max_staleness: float = 0

    def print(self, name: str, plain: Row) -> None:
        wasted = f"{self.wasted / 1e6:.2f}M {self.wasted / self.generated:6.1%}"
        finished = f"{self.wasted_finished / 1e6:.2f}M {self.wasted_finished / self.generated:6.1%}"
        print(
            f"{name:<16}{self.seconds:>7.0f}s{self.seconds / plain.seconds:>7.2f}"
            f"{self.generated / 1e6:>10.2f}M{wasted:>16}{finished:>24}"
            f"{self.mean_length:>13.0f}{self.max_staleness:>15.0f}"
        )


def measure(way: Way, sigma: float, steps: int, batch: int, over: float) -> Row:
    async def main() -> Row:
        engine = SimulatedEngine(sigma)
        loop = asyncio.get_running_loop()
        answers, row = Answers(), Row()
        with (
            tempfile.TemporaryDirectory() as folder,
            manager_for(way, engine, answers, batch, over, Path(folder)) as manager,
        ):
            for step in range(1, steps + 1):
                engine.version = step - 1
                started = loop.time()
                result = await manager.collect(step=step, version=step - 1)
                row.seconds += loop.time() - started
                manager.consumed(result, step)
                row.generated += result.metrics["rollout/generated_tokens"]
                row.wasted += result.metrics["rollout/wasted_tokens"]
                row.mean_length += result.metrics["rollout/response_length_mean"] / steps
                staleness = result.metrics["rollout/staleness_max"]
                row.max_staleness = max(row.max_staleness, staleness)
        row.wasted_finished = answers.num_wasted
        return row

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--over", type=float, default=1.5)
    options = parser.parse_args()
    print(f"{options.steps} batches of {options.batch} × {GROUP_SIZE} answers")
    print(f"over-sampling × {options.over:g}; shares are of all tokens generated")
    for sigma in (1.0, 1.4):
        rows = {
            way.name: measure(way, sigma, options.steps, options.batch, options.over)
            for way in WAYS
        }
        plain = rows["plain"]
        print(f"\nsigma {sigma}")
        print(f"{'':<16}{'time':>8}{'ratio':>7}{'generated':>11}{'tokens wasted':>16}"
              f"{'finished tokens wasted':>24}{'mean length':>13}{'staleness':>15}")  # fmt: skip
        for name, row in rows.items():
            row.print(name, plain)


if __name__ == "__main__":
    main()
