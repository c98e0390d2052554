"""Figures of a batch, worked out by hand."""

from __future__ import annotations

import pytest

from rollmill.rollout.metrics import batch_metrics
from rollmill.sample import Group, Status
from rollmill.testing import make_group


def test_attempts_count_once_in_rewards_and_samples_in_lengths() -> None:
    first = make_group(0, (1.0, 0.0), length=4, version=3)
    twin = make_group(0, (1.0,), length=10, version=2).samples[0]
    twin.index = 77
    groups = [Group(0, [*first.samples, twin]), make_group(1, (1.0, None), length=6, version=5)]
    groups[1].samples[0].status = Status.TRUNCATED
    metrics = batch_metrics(groups, version=5, reward_key=None)
    assert metrics["reward/mean"] == pytest.approx((1 + 0 + 1) / 3)
    assert metrics["rollout/response_length_mean"] == pytest.approx((4 + 4 + 10 + 6 + 0) / 5)
    assert metrics["rollout/response_length_max"] == 10
    assert metrics["rollout/truncated"] == pytest.approx(1 / 5)
    assert metrics["rollout/failed_samples"] == 1
    assert metrics["rollout/staleness_max"] == 3
    assert metrics["rollout/staleness_mean"] == pytest.approx((2 + 2 + 3 + 0) / 4)
    assert metrics["rollout/num_samples"] == 5
    assert metrics["reward/outcome/value"] == pytest.approx(4 / 5)
    assert metrics["rollout/zero_std_groups"] == pytest.approx(1 / 2)


def test_parts_of_rewards_have_their_own_means() -> None:
    group = make_group(0, (0.0, 0.0))
    for number, sample in enumerate(group.samples):
        sample.reward = {"right": float(number), "style": 2.0}
    metrics = batch_metrics([group], version=0, reward_key="right")
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/part/right"] == 0.5
    assert metrics["reward/part/style"] == 2.0
    assert metrics["reward/max"] == 1.0


def test_an_empty_batch_has_figures() -> None:
    metrics = batch_metrics([], version=0, reward_key=None)
    assert metrics["reward/mean"] == 0.0
    assert metrics["rollout/response_length_max"] == 0.0
