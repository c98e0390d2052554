"""Functions of the user's that raise or leave things behind: named, and costing what they must."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_helpers import LengthJudge, Side, make_side, make_source, run

from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.errors import HookError
from rollmill.rollout.custom import RolloutContext
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.hooks import LoadedHooks
from rollmill.sample import Group, Sample, Segment, Status, int_array
from rollmill.sample_rows import row_to_sample, sample_to_row
from rollmill.testing import FakeEngines, make_context, make_sample


def broken_policy(waiting: list[Group], n: int) -> list[Group]:
    raise ZeroDivisionError("mine")


class BrokenSource:
    """A source whose rows cannot be read any more."""

    def __init__(self) -> None:
        self._whole = make_source()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def take(self, n: int) -> list[Group]:
        raise ZeroDivisionError("mine")


def with_policy(folder: Path) -> Side:
    source = make_source(buffer_policy=broken_policy)
    source.give_back(source.take(1))
    return make_side(folder, FakeEngines(4), source=source)


def with_source(folder: Path) -> Side:
    return make_side(folder, FakeEngines(4), source=BrokenSource())


def with_ranking(folder: Path) -> Side:
    (folder / "own.py").write_text("def rank(groups):\n    return 1 / 0\n")
    config = {"over_sampling_batch_size": 6, "filters": {"over_sampling": "own.py:rank"}}
    return make_side(folder, FakeEngines(4), config=config)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (with_policy, "rollout.hooks.buffer_policy"),
        (with_source, "rollout.hooks.data_source"),
        (with_ranking, "rollout.filters.over_sampling"),
    ],
)
def test_a_function_that_raises_ends_the_run_with_its_name(
    tmp_path: Path, make: Callable[[Path], Side], where: str
) -> None:
    side = make(tmp_path)

    async def main() -> None:
        with pytest.raises(HookError, match=where) as caught:
            await side.collect()
        assert "ZeroDivisionError" in str(caught.value)

    run(main)


def test_failed_samples_of_a_rollout_function_are_out_of_the_loss(tmp_path: Path) -> None:
    async def generate(sample: Sample, context: GenerateContext) -> Sample:
        await context.extend(sample)
        if sample.attempt:
            raise ValueError("bad day")
        return sample

    async def keeps_them(context: RolloutContext) -> list[Group]:
        return [await context.answer(group) for group in context.take(context.batch_size)]

    hooks = LoadedHooks(generate=generate, rollout=keeps_them)
    side = make_side(tmp_path, FakeEngines(4), hooks=hooks, config={"max_attempt_retries": 0})

    async def main() -> None:
        batch = await side.train()
        for group in batch.groups:
            assert [s.status is Status.FAILED for s in group.samples] == [False, True]
            assert [s.in_loss for s in group.samples] == [True, False]

    run(main)


@pytest.mark.parametrize(
    "changes",
    [
        {"filters": {"dynamic": "nonzero_std"}},
        {"filters": {"max_mean_length": 5}},
        {"filters": {"over_sampling": "by_reward_std"}},
        {"over_sampling_batch_size": 9},
    ],
)
def test_settings_that_a_rollout_function_makes_meaningless_are_refused(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"hooks.rollout: does not go together with"):
        RolloutConfig.model_validate({"hooks": {"rollout": "whole.py:f"}} | changes)


def test_a_retry_starts_from_the_prompt_that_was_given_whatever_the_function_made_of_it(
    tmp_path: Path,
) -> None:
    seen: list[list[int]] = []

    async def compacts(sample: Sample, context: GenerateContext) -> Sample:
        seen.append(sample.prompt_tokens.tolist())
        sample.prompt_tokens = int_array([*sample.prompt_tokens[:1], 99])
        await context.extend(sample)
        if len(seen) == 1:
            raise ValueError("bad day")
        return sample

    side = make_side(
        tmp_path,
        FakeEngines(4),
        hooks=LoadedHooks(generate=compacts),
        config={"batch_size": 1, "n_samples_per_prompt": 1},
    )

    async def main() -> None:
        await side.train()
        assert seen == [[100, 7, 8]] * 2

    run(main)


def test_a_group_judge_leaves_rewards_that_the_generate_function_set(tmp_path: Path) -> None:
    async def sure(sample: Sample, context: GenerateContext) -> Sample:
        await context.extend(sample)
        if sample.attempt == 0:
            sample.reward = 7.0
        return sample

    side = make_side(
        tmp_path,
        FakeEngines(4),
        hooks=LoadedHooks(generate=sure),
        judge=LengthJudge(lambda _: 1.0),
        reward=RewardConfig(function="judges.py:all", per_group=True),
    )

    async def main() -> None:
        batch = await side.train()
        assert [[s.reward for s in g.samples] for g in batch.groups] == [[7.0, 1.0]] * 4

    run(main)


def test_metadata_that_cannot_be_written_costs_its_sample_and_says_why(tmp_path: Path) -> None:
    async def notes(sample: Sample, context: GenerateContext) -> Sample:
        await context.extend(sample)
        sample.metadata["seen"] = {1, 2} if sample.group_index == 1 else np.arange(3)
        return sample

    side = make_side(tmp_path, FakeEngines(4), hooks=LoadedHooks(generate=notes))

    async def main() -> None:
        batch = await side.train()
        assert [group.group_index for group in batch.groups] == [0, 2, 3, 4]
        ((group, reason),) = batch.failed
        assert group.group_index == 1
        assert "metadata cannot be written as JSON" in reason
        row = sample_to_row(batch.groups[0].samples[0])
        assert row_to_sample(row).metadata["seen"] == [0, 1, 2]

    run(main)


def test_a_sibling_has_nothing_of_the_sample_that_it_was_begun_from() -> None:
    sample = make_sample(segments=[Segment.from_engine([5, 6], [-1, -1], 0)], in_loss=False)
    sample.teacher_log_probs = np.asarray([-1, -1], np.float32)
    sample.routed_experts = np.zeros((5, 1, 1), np.int32)
    before = copy.copy(sample)
    twin = make_context().sibling(sample)
    assert (twin.in_loss, twin.teacher_log_probs, twin.routed_experts) == (True, None, None)
    assert twin.response_length == 0
    assert sample.routed_experts is before.routed_experts
