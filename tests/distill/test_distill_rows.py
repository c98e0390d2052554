"""A recorded row as a sample: which of its vectors goes where, and what its mask takes out."""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.config.sampling import SamplingConfig
from rollmill.distill.rows import RecordedRow, row_of
from rollmill.sample import Status, float_array, int_array

SAMPLER, STUDENT, TEACHER = [-1.0, -1.5, -2.0, -2.5], [-3.0] * 4, [-4.0, -4.25, -4.5, -4.75]


def row(mask: list[int] | None = None, finish_reason: str = "length") -> RecordedRow:
    return RecordedRow(
        prompt_index=3,
        attempt=1,
        prompt="12",
        prompt_tokens=int_array([4, 5]),
        response_tokens=int_array([6, 7, 8, 9]),
        response="345",
        finish_reason=finish_reason,
        sampler_log_probs=float_array(SAMPLER),
        student_log_probs=float_array(STUDENT),
        teacher_log_probs=float_array(TEACHER),
        teacher="strict",
        sampling=SamplingConfig(),
        label="21",
        metadata={"a": 1},
        loss_mask=None if mask is None else np.array(mask, np.bool_),
    )


@pytest.mark.parametrize("mask", [None, [1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 1]])
def test_every_token_keeps_its_place_and_its_values_whatever_the_mask(
    mask: list[int] | None,
) -> None:
    sample = row(mask).to_sample(index=5, group_index=6, attempt=0)
    is_learned = [bool(flag) for flag in mask or [1] * 4]
    assert sample.response_tokens.tolist() == [6, 7, 8, 9]
    assert sample.response_length == 4
    assert sample.loss_mask.tolist() == is_learned
    assert sample.teacher_log_probs is not None
    assert sample.teacher_log_probs.tolist() == TEACHER
    own = sample.rollout_log_probs
    assert own[sample.loss_mask].tolist() == [
        value for value, learned in zip(SAMPLER, is_learned, strict=True) if learned
    ]
    assert (sample.index, sample.group_index, sample.attempt) == (5, 6, 0)


@pytest.mark.parametrize(
    "reason, status", [("stop", Status.COMPLETED), ("length", Status.TRUNCATED)]
)
def test_the_status_is_that_of_the_recorded_end(reason: str, status: Status) -> None:
    assert row(None, reason).to_sample(index=0, group_index=0, attempt=0).status is status


def test_a_record_gives_the_row_again() -> None:
    first = row()
    again = row_of(first.to_record())
    for name in ("prompt_tokens", "response_tokens"):
        assert getattr(again, name).tolist() == getattr(first, name).tolist()
    assert again.sampler_log_probs.tolist() == SAMPLER
    assert again.student_log_probs.tolist() == STUDENT
    assert again.teacher_log_probs.tolist() == TEACHER
    assert (again.prompt_index, again.attempt, again.teacher) == (3, 1, "strict")
    assert (again.prompt, again.label, again.metadata) == ("12", "21", {"a": 1})
    assert again.sampling == first.sampling
    assert first.to_record()["checksum"] == again.to_record()["checksum"]
