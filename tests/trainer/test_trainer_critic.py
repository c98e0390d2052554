"""PPO with a critic: value loss, values, learning, and state."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_testkit import make_group, tiny_llama

from rollmill.config.trainer import TrainerConfig
from rollmill.sample_codec import encode_group
from rollmill.trainer.advantages import AdvantageInput, ppo
from rollmill.trainer.critic import ValueModel, explained_variance, value_loss
from rollmill.trainer.layout import TokenSequence, plan_padded, plan_trees
from rollmill.trainer.replay import is_timing
from rollmill.trainer.worker import TorchTrainer


def test_value_loss_by_hand() -> None:
    # Old value 0, clip 0.2. V = 1, R = 2: max(1, (0.2 − 2)²) / 2 = 1.62. V = 0.1, R = 1: not
    # clipped, 0.81 / 2. V = 1, R = 0: max(1, 0.04) / 2.
    values, returns = torch.tensor([1.0, 0.1, 1.0]), torch.tensor([2.0, 1.0, 0.0])
    losses = value_loss(values, torch.zeros(3), returns, clip=0.2)
    assert losses.tolist() == pytest.approx([1.62, 0.405, 0.5])
    assert value_loss(values, torch.zeros(3), returns, clip=None).tolist() == pytest.approx(
        [0.5, 0.405, 0.5]
    )


def test_explained_variance_by_hand() -> None:
    returns = np.array([0.0, 2.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.array([1.0, 1.0]), returns) == 0
    # Errors ±0.5: variance 0.25 of 1.
    assert explained_variance(np.array([0.5, 1.5]), returns) == pytest.approx(0.75)


def test_ppo_advantages_by_hand() -> None:
    # γ = λ = 1, one sample of two tokens, reward 1, penalty 0.5 on the first, V = (0.25, 0.75).
    # Returns: 0.5 and 1; advantages 0.25 and 0.25; whitened: no spread, exactly 0.
    # A second sample, reward 0, one token, V = 0.5: advantage −0.5.
    inputs = AdvantageInput(
        rewards=np.array([1.0, 0.0]),
        groups=np.array([0, 0]),
        attempts=np.array([0, 1]),
        masks=[np.array([True, True]), np.array([True])],
        token_penalties=[np.array([0.5, 0.0]), np.array([0.0])],
        values=[np.array([0.25, 0.75]), np.array([0.5])],
    )
    advantages, targets = ppo(inputs, gamma=1.0, lam=1.0)
    scale = math.sqrt(0.125 + 1e-8)  # mean 0, variance (2·0.0625 + 0.25) / 3 = 0.125
    assert advantages[0] == pytest.approx([0.25 / scale] * 2)
    assert advantages[1] == pytest.approx([-0.5 / scale])
    assert [target.tolist() for target in targets] == [[0.5, 1.0], [0.0]]


def test_values_are_those_of_the_state_before_each_token(rng: np.random.Generator) -> None:
    model = ValueModel(tiny_llama(), device=torch.device("cpu"))
    torch.nn.init.normal_(model.model.value_head.weight)
    prompt = rng.integers(3, 60, 4)
    items = [
        TokenSequence(np.concatenate([prompt, rng.integers(3, 6, n)]), np.arange(4, 4 + n))
        for n in (3, 5)
    ]
    for planner in (plan_padded, plan_trees):
        (batch,) = planner(items, 100)
        values, _ = model.log_probs(batch, temperature=1.0)
        expected = []
        for member in batch.members:
            tokens = torch.from_numpy(items[member].tokens)[None]
            states = model.model.model(tokens).last_hidden_state[0]
            expected.append(model.model.value_head(states)[items[member].targets - 1, 0])
        torch.testing.assert_close(values, torch.cat(expected))


def trainer(path: str, **changes: Any) -> TorchTrainer:
    config = TrainerConfig.model_validate(
        {
            "num_threads": 1,
            "algorithm": {"advantage": "ppo"},
            "critic": {"lr": 1e-2, "value_clip": None},
            **changes,
        }
    )
    return TorchTrainer(
        config=config.model_dump(mode="json"),
        model_path=path,
        seed=0,
        num_total_steps=30,
        context_length=64,
    )


def train(which: TorchTrainer, step: int) -> dict[str, float]:
    # Two prompts; one always earns 1, the other 0: a critic can know that.
    rng = np.random.default_rng(5)
    groups = [make_group(i, [float(i)] * 4, rng=rng) for i in range(2)]
    return which.train(
        [encode_group(group) for group in groups],
        step=step,
        reward_key=None,
        max_new_tokens=8,
        temperature=1.0,
    )


def test_the_critic_learns_and_advantages_shrink_before_whitening(
    save_model: Callable[..., str],
) -> None:
    which = trainer(save_model(tiny_llama()))
    reports = [train(which, step) for step in range(12)]
    assert reports[0]["critic/value_mean"] == 0
    assert reports[0]["critic/explained_variance"] == 0
    assert reports[-1]["critic/explained_variance"] > 0.9
    assert reports[-1]["critic/loss"] < reports[0]["critic/loss"] / 10


def test_resuming_restores_the_critic_too(save_model: Callable[..., str], tmp_path: Path) -> None:
    path = save_model(tiny_llama())
    straight = trainer(path)
    expected = [train(straight, step) for step in range(4)]
    first, second = trainer(path), trainer(path)
    for step in range(2):
        train(first, step)
    first.save(str(tmp_path / "state"))
    second.load(str(tmp_path / "state"))
    for step in (2, 3):
        found = train(second, step)
        assert {k: v for k, v in found.items() if not is_timing(k)} == {
            k: v for k, v in expected[step].items() if not is_timing(k)
        }
