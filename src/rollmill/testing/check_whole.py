"""Functions that replace a whole part, run once as a run does: collecting, evaluating."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import Ledger, State
from rollmill.data.loading import Dataset, Part
from rollmill.data.prompts import PromptRow
from rollmill.data.source import PromptSource
from rollmill.errors import HookError
from rollmill.filters import DynamicFilter
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rollout.evaluate import EvaluationContext, EvaluationFunction, evaluate_with
from rollmill.rollout.group import GroupRunner
from rollmill.rollout.hooks import LoadedHooks, generate_overrides
from rollmill.rollout.manager import RolloutManager, RolloutParts
from rollmill.sample import Group, Sample, int_array
from rollmill.testing.fakes import FakeCall, FakeEngines, make_batch, make_context

NUM_STEPS = 3


class EvenLengths:
    """A judge: answers of even length are right."""

    async def judge(self, sample: Sample) -> Outcome:
        """1 or 0."""
        return Outcome(OutcomeKind.VALUE, float(sample.response_length % 2 == 0))

    async def judge_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """1 or 0 for each."""
        return [await self.judge(sample) for sample in samples]


async def check_rollout_function(hooks: LoadedHooks, *, where: str) -> None:
    """Collect a few batches with `hooks.rollout`, one prompt of which cannot be answered.

    Raises:
        HookError: it raised, returned no batch, or left work in flight.
    """
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        try:
            manager = _manager(hooks, ledger, Path(folder))
            for step in range(1, NUM_STEPS + 1):
                batch = await manager.collect(step=step, version=step - 1)
                manager.consumed(batch, step)
            in_flight = ledger.balance()[State.IN_FLIGHT]
        finally:
            ledger.close()
    if in_flight:
        raise HookError(
            "a rollout function left groups in flight", where=where, found=str(in_flight)
        )


async def check_evaluation_function(function: EvaluationFunction) -> None:
    """Call an evaluation function with two sets of made-up answers.

    Raises:
        HookError: it raised, or returned something else than metrics.
    """

    async def answer(name: str) -> list[Group]:
        return make_batch()

    def metrics(name: str, groups: list[Group]) -> dict[str, float]:
        return {f"eval/{name}/reward": 0.5, f"eval/{name}/pass@1": 0.5}

    await evaluate_with(function, EvaluationContext(3, ("first", "second"), answer, metrics))


def _manager(hooks: LoadedHooks, ledger: Ledger, folder: Path) -> RolloutManager:
    config = RolloutConfig(batch_size=3, n_samples_per_prompt=2, max_attempt_retries=0)
    rows = tuple(PromptRow(f"t{i}", int_array([100 + i, 7]), "t7", {"row": i}) for i in range(16))
    source = PromptSource(Dataset((Part("made up", rows),)), n_samples_per_prompt=2)
    engines = FakeEngines(lambda call: 3 + call.input_ids[0] % 4)
    engines.fault = _fail_one_prompt
    runner = GroupRunner(
        generate=hooks.generate,
        overrides=generate_overrides(folder),
        context=replace(make_context(engines), new_index=source.new_index),
        judge=EvenLengths(),
        reward=RewardConfig(type="math"),
        max_retries=config.max_attempt_retries,
    )
    parts = RolloutParts(
        source=source,
        ledger=ledger,
        runner=runner,
        dynamic_filter=DynamicFilter(config.filters, reward_key=None, base_dir=folder),
        ranking=None,
        hooks=hooks,
        reward_key=None,
    )
    return RolloutManager(config, parts)


def _fail_one_prompt(call: FakeCall) -> None:
    if call.input_ids[0] == 105:
        raise ConnectionError("made up: this prompt cannot be answered")
