"""What of a batch of rollouts is trained on, and how it divides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmill.errors import TrainerError
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.trainer.batch import build_batch


def sample(attempt: int, *segments: Segment, **fields: Any) -> Sample:
    values = {"reward": 1.0, "status": Status.COMPLETED, "group_index": 4, **fields}
    return Sample(prompt_tokens=[1, 2], attempt=attempt, segments=list(segments), **values)


def engine(*tokens: int) -> Segment:
    return Segment.from_engine(tokens, -np.arange(1.0, len(tokens) + 1), 0)


def test_flat_arrays_hold_the_trainable_tokens_in_order() -> None:
    tool = Segment.from_environment([7, 7])
    group = Group(4, [sample(0, engine(5, 6), tool, engine(8)), sample(1, engine(9))])
    batch = build_batch([group], reward_key=None)
    assert batch.num_tokens == 4
    assert batch.rollout_log_probs.tolist() == [-1, -2, -1, -1]
    assert batch.token_samples.tolist() == [0, 0, 0, 1]
    assert batch.sequence(0).targets.tolist() == [2, 3, 6]
    assert [values.tolist() for values in batch.unflatten(np.arange(1.0, 5))] == [
        [1, 2, 0, 0, 3],
        [4],
    ]


def test_failed_samples_leave_and_samples_out_of_loss_stay_in_the_statistics() -> None:
    group = Group(
        4,
        [
            sample(0, engine(5), status=Status.FAILED, reward=None),
            sample(1, engine(6), in_loss=False, reward=0.25),
            sample(2, engine(7), reward=0.75),
        ],
    )
    batch = build_batch([group], reward_key=None)
    assert batch.rewards.tolist() == [0.25, 0.75]
    assert batch.num_tokens == 1
    assert (batch.num_failed, batch.num_slots) == (1, 3)


def test_siblings_are_one_attempt() -> None:
    group = Group(4, [sample(0, engine(5)), sample(1, engine(6)), sample(0, engine(7))])
    batch = build_batch([group], reward_key=None)
    assert batch.attempts.tolist() == [0, 0, 1]
    assert len(batch.rewards) == 2


def test_steps_count_places_so_that_a_failure_moves_nobody_to_another_step() -> None:
    members = [sample(n, engine(n + 3)) for n in range(4)]
    members[1].fail("engine died")
    batch = build_batch([Group(4, members)], reward_key=None)
    assert [part.tolist() for part in batch.steps(2)] == [[0], [1, 2]]
    assert [part.tolist() for part in batch.steps(None)] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("num_slots", "size", "expected"),
    [(3, 2, [2, 1]), (6, 4, [3, 3]), (8, 3, [3, 3, 2]), (2, 4, [2]), (8, 4, [4, 4])],
)
def test_a_batch_that_does_not_divide_makes_steps_of_nearly_the_same_size(
    num_slots: int, size: int, expected: list[int]
) -> None:
    members = [sample(number, engine(5)) for number in range(num_slots)]
    batch = build_batch([Group(4, members)], reward_key=None)
    steps = batch.steps(size)
    assert [len(part) for part in steps] == expected
    assert np.concatenate(steps).tolist() == list(range(num_slots)), "each is in one step"


def test_reward_parts_are_picked_by_key() -> None:
    group = Group(4, [sample(0, reward={"exact": 1.0, "form": 0.5})])
    assert build_batch([group], reward_key="form").rewards.tolist() == [0.5]
    with pytest.raises(TrainerError, match=r"reward\.key"):
        build_batch([group], reward_key=None)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (sample(0, engine(5), reward=None), "no usable reward"),
        (sample(0, engine(5), reward=float("nan")), "finite reward"),
        (sample(0, engine(5), status=Status.ABORTED), "status aborted"),
        (sample(0, engine(99)), "vocabulary size 20"),
        (sample(0, engine(*range(9))), "at most 10 tokens"),
        (sample(0, Segment.from_engine([5], [-np.inf], 0)), "finite log-probs"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(bad: Sample, expected: str) -> None:
    with pytest.raises(TrainerError, match=expected):
        build_batch([Group(4, [bad])], reward_key=None, vocab_size=20, context_length=10)


def test_samples_without_reward_are_fine_when_none_is_needed() -> None:
    batch = build_batch(
        [Group(4, [sample(0, engine(5), reward=None)])], reward_key=None, needs_reward=False
    )
    assert np.isnan(batch.rewards).all()
