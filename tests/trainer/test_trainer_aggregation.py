"""Weights of tokens, and the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.trainer import AlgorithmConfig, OptimizerConfig
from rollmill.trainer.aggregation import (
    REDUCERS,
    StepTokens,
    constant,
    per_rollout,
    per_token,
)
from rollmill.trainer.schedule import learning_rate

# Three attempts: two tokens, none, and two (of two siblings).
ATTEMPTS = [0, 0, 2, 2]


def step(attempts: list[int], num_attempts: int, constant_length: int = 1) -> StepTokens:
    ids = np.array(attempts, np.int64)
    return StepTokens(ids, ids, num_attempts, constant_length)


def test_per_rollout_is_the_mean_over_attempts_of_their_means() -> None:
    assert per_rollout(step(ATTEMPTS, 3)) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 6])
    assert per_rollout(step([0, 1, 1], 2)) == pytest.approx([0.5, 0.25, 0.25])


def test_per_token_is_the_mean_over_tokens() -> None:
    assert per_token(step(ATTEMPTS, 3)).tolist() == [0.25] * 4


def test_constant_divides_by_attempts_and_length() -> None:
    weights = constant(step(ATTEMPTS, 3, constant_length=10))
    assert weights == pytest.approx([1 / 30] * 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_means_have_total_weight_one(lengths: list[int]) -> None:
    tokens = step(np.repeat(np.arange(len(lengths)), lengths).tolist(), len(lengths))
    assert per_rollout(tokens).sum() == pytest.approx(1)
    assert per_token(tokens).sum() == pytest.approx(1)


@pytest.mark.parametrize("name", REDUCERS)
def test_no_tokens_have_no_weights(name: str) -> None:
    for num_attempts in (4, 0):  # 0: all attempts of the optimizer step failed
        assert len(REDUCERS[name](step([], num_attempts), AlgorithmConfig())) == 0


def rates(config: OptimizerConfig, total: int) -> list[float]:
    return [learning_rate(config, step=step, num_total_steps=total) for step in range(total)]


def test_warmup_is_linear_and_then_constant() -> None:
    assert rates(OptimizerConfig(lr=0.4, warmup_steps=4), 6) == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )


def test_linear_decay_ends_at_the_floor() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr_ratio=0.2)
    assert rates(config, 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_after_warmup() -> None:
    config = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=2)
    # Peak at step 1, zero at step 5, halfway at step 3.
    assert rates(config, 6) == pytest.approx([0.5, 1.0, 0.8535533906, 0.5, 0.1464466094, 0.0])


def test_steps_beyond_the_end_stay_at_the_floor() -> None:
    config = OptimizerConfig(lr=1.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(config, step=99, num_total_steps=5) == pytest.approx(0.1)
