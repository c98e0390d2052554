"""Advantage estimators against vectors worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.trainer import AlgorithmConfig
from rollmill.trainer.advantages import (
    ESTIMATORS,
    NEEDS_CRITIC,
    AdvantageInput,
    discounted_returns,
    dr_grpo,
    gae,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    whiten,
)

GROUPS = np.array([7, 7, 7, 3, 3])
REWARDS = np.array([1.0, 0.0, 0.5, 2.0, 4.0])


def inputs(
    rewards: list[float],
    groups: list[int],
    masks: list[list[int]],
    attempts: list[int] | None = None,
) -> AdvantageInput:
    return AdvantageInput(
        rewards=np.array(rewards),
        groups=np.array(groups),
        attempts=np.array(attempts or range(len(rewards))),
        masks=[np.array(mask, bool) for mask in masks],
    )


def test_grpo_by_hand() -> None:
    # Group 7: mean 0.5, deviations ±0.5 and 0, unbiased variance (0.25 + 0.25) / 2 = 0.25, std 0.5.
    # Group 3: mean 3, deviations ±1, unbiased variance 2, std √2.
    first = 0.5 / (0.5 + 1e-6)
    second = 1 / (math.sqrt(2) + 1e-6)
    expected = [first, -first, 0.0, -second, second]
    assert grpo(REWARDS, GROUPS) == pytest.approx(expected, abs=1e-15)


def test_grpo_without_std_and_dr_grpo_are_the_centered_rewards() -> None:
    expected = [0.5, -0.5, 0.0, -1.0, 1.0]
    assert grpo(REWARDS, GROUPS, normalize_std=False).tolist() == expected
    assert dr_grpo(REWARDS, GROUPS).tolist() == expected


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    # 1 − (0 + 0.5)/2, 0 − (1 + 0.5)/2, 0.5 − (1 + 0)/2, 2 − 4, 4 − 2
    assert rloo(REWARDS, GROUPS) == pytest.approx([0.75, -0.75, 0.0, -2.0, 2.0])


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=12))
def test_rloo_equals_leave_one_out_for_any_interleaving_of_groups(
    entries: list[tuple[float, int]],
) -> None:
    rewards = np.array([reward for reward, _ in entries])
    groups = np.array([group for _, group in entries])
    for position, advantage in enumerate(rloo(rewards, groups)):
        others = (groups == groups[position]) & (np.arange(len(groups)) != position)
        expected = rewards[position] - rewards[others].mean() if others.any() else 0.0
        assert advantage == pytest.approx(expected, abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 6))
def test_identical_rewards_give_exactly_zero(reward: float, n: int) -> None:
    rewards, groups = np.full(n, reward), np.zeros(n, np.int64)
    for advantages in (grpo(rewards, groups), dr_grpo(rewards, groups), rloo(rewards, groups)):
        assert advantages.tolist() == [0.0] * n


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - NEEDS_CRITIC))
def test_a_batch_of_identical_rewards_gives_exactly_zero(name: str) -> None:
    batch = inputs([0.1, 0.1, 0.1], [0, 0, 1], [[1, 1], [1], [1, 0, 1]])
    for advantages in ESTIMATORS[name](batch, AlgorithmConfig()):
        assert not np.asarray(advantages).any()


def test_fanned_out_siblings_count_once_and_share_the_advantage() -> None:
    # Attempt 0 (reward 1) is two samples, attempt 1 (reward 0) one: mean 0.5, not 2/3.
    batch = inputs([1.0, 0.0], [0, 0], [[1, 1], [0, 1], [1]], attempts=[0, 0, 1])
    advantages = ESTIMATORS["dr_grpo"](batch, AlgorithmConfig())
    assert [list(values) for values in advantages] == [[0.5, 0.5], [0.0, 0.5], [-0.5]]


def test_discounted_returns_skip_masked_tokens() -> None:
    # γ = 0.5; unmasked tokens 0, 2, 3 with rewards 1, 0, 4: G_3 = 4, G_2 = 0 + 2, G_0 = 1 + 1.
    returns = discounted_returns(
        np.array([1.0, 99.0, 0.0, 4.0]), np.array([1, 0, 1, 1], bool), gamma=0.5
    )
    assert returns.tolist() == [2.0, 0.0, 2.0, 4.0]


def test_reinforce_plus_plus_by_hand() -> None:
    # γ = 1, rewards 3 and 1, all tokens of a sample get its reward: 3, 3 and 1, 1 (the last is
    # masked and left out, so the reward sits on the token before it).
    # Mean 2, variance 1: whitened to ±1 / sqrt(1 + 1e-8).
    batch = inputs([3.0, 1.0], [0, 1], [[1, 1], [1, 1, 0]])
    one = 1 / math.sqrt(1 + 1e-8)
    first, second = reinforce_plus_plus(batch, gamma=1.0)
    assert first == pytest.approx([one, one])
    assert second == pytest.approx([-one, -one, 0.0])


def test_reinforce_plus_plus_takes_token_penalties_off_where_they_occur() -> None:
    # One sample, reward 1 on the last token, penalties 0.5 and 0.25: returns 0.25 and 0.75;
    # mean 0.5, deviations ±0.25.
    batch = inputs([1.0], [0], [[1, 1]])
    batch = AdvantageInput(
        batch.rewards, batch.groups, batch.attempts, batch.masks, [np.array([0.5, 0.25])]
    )
    (advantages,) = reinforce_plus_plus(batch, gamma=1.0)
    scale = 0.25 / math.sqrt(0.0625 + 1e-8)
    assert advantages == pytest.approx([-scale, scale])


def test_reinforce_plus_plus_survives_a_fully_masked_sample() -> None:
    batch = inputs([3.0, 1.0], [0, 1], [[0, 0], [1]])
    assert [values.tolist() for values in reinforce_plus_plus(batch, gamma=1.0)] == [[0, 0], [0]]


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Group of rewards 1 and 0 centered: ±0.5. Tokens: 3 × 0.5 and 1 × −0.5: mean 0.25,
    # variance (3·0.0625 + 0.5625)/4 = 0.1875.
    batch = inputs([1.0, 0.0], [0, 0], [[1, 1, 1], [1]])
    scale = math.sqrt(0.1875 + 1e-8)
    first, second = reinforce_plus_plus_baseline(batch)
    assert first == pytest.approx([0.25 / scale] * 3)
    assert second == pytest.approx([-0.75 / scale])


def test_whitening_ignores_what_lies_under_the_mask() -> None:
    masks = [np.array([1, 0, 1], bool), np.array([1], bool)]
    clean = whiten([np.array([1.0, 0.0, 2.0]), np.array([3.0])], masks)
    dirty = whiten([np.array([1.0, 1e9, 2.0]), np.array([3.0])], masks)
    assert [values.tolist() for values in clean] == [values.tolist() for values in dirty]
    assert np.concatenate(clean)[[0, 2, 3]].mean() == pytest.approx(0)


def test_gae_by_hand_over_unmasked_tokens() -> None:
    # γ = 0.5, λ = 0.5, unmasked tokens 0 and 2: r = (0, 1), V = (0.5, 0.25).
    # Token 2: δ = 1 − 0.25 = 0.75, A = 0.75. Token 0: δ = 0 + 0.5·0.25 − 0.5 = −0.375,
    # A = −0.375 + 0.25·0.75 = −0.1875. Targets: A + V.
    advantages, targets = gae(
        np.array([0.0, 9.0, 1.0]),
        np.array([0.5, 9.0, 0.25]),
        np.array([1, 0, 1], bool),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages.tolist() == [-0.1875, 0.0, 0.75]
    assert targets.tolist() == [0.3125, 0.0, 1.0]


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    rewards, values = np.array([0.5, 0.0, 2.0]), np.array([0.1, 0.2, 0.3])
    mask = np.ones(3, bool)
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    assert advantages == pytest.approx(discounted_returns(rewards, mask, gamma=0.9) - values)
