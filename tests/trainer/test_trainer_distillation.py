"""On-policy distillation in the objective: the paper's update, and its known faults absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_testkit import learner, make_group

from rollmill.config.opd import OpdConfig
from rollmill.config.trainer import AlgorithmConfig
from rollmill.sample import Group
from rollmill.trainer.distillation import distilled
from rollmill.trainer.layout import TokenSequence
from rollmill.trainer.learner import Learner
from rollmill.trainer.losses import TokenBatch, policy_gradient
from rollmill.trainer.metrics import token_metrics
from rollmill.trainer.objective import objective
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.scoring import score_sequences


def tokens_at(log_probs: Tensor, sampled: Tensor, teacher: Tensor) -> TokenBatch:
    return TokenBatch(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        rollout_log_probs=sampled,
        advantages=torch.zeros_like(sampled),
        sequences=torch.tensor([0, 0, 1]),
        num_sequences=2,
        teacher_log_probs=teacher,
    )


def gradient_of(log_probs: list[float], opd: OpdConfig) -> list[float]:
    """−∂loss/∂log π: the advantage that the update uses."""
    leaf = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    teacher = torch.tensor([-2.0, -0.5, -40.0], dtype=torch.float64)
    config = AlgorithmConfig(advantage="none", loss="policy_gradient")
    result = objective(tokens_at(leaf, sampled, teacher), config, policy_gradient, opd)
    result.losses.sum().backward()
    assert leaf.grad is not None
    return (-leaf.grad).tolist()


def test_the_advantage_follows_the_current_policy_and_is_never_frozen() -> None:
    opd = OpdConfig(clip=None)
    assert gradient_of([-1.0, -1.0, -1.0], opd) == pytest.approx([-1.0, 0.5, -39.0])
    assert gradient_of([-2.0, -0.5, -40.0], opd) == pytest.approx([0.0, 0.0, 0.0])
    assert gradient_of([-3.0, -0.25, -41.0], opd) == pytest.approx([1.0, -0.25, 1.0])


def test_the_advantage_is_clipped_at_ten() -> None:
    assert OpdConfig().clip == 10
    assert gradient_of([-1.0, -1.0, -1.0], OpdConfig()) == pytest.approx([-1.0, 0.5, -10.0])


@pytest.mark.parametrize(
    "level, weight_of",
    [
        ("token", lambda w: w),
        ("sequence", lambda w: np.array([w[0] * w[1], w[0] * w[1], w[2]])),
    ],
)
def test_importance_weights_are_truncated_and_not_used_unless_asked_for(
    level: str, weight_of: Callable[[Any], Any]
) -> None:
    log_probs = [-0.9, -0.8, -0.25]  # one answer of two tokens, one of one
    plain = gradient_of(log_probs, OpdConfig(clip=None))
    assert plain == pytest.approx([-1.1, 0.3, -39.75])
    opd = OpdConfig(
        clip=None, importance="truncate", importance_level=level, importance_cap=1.5, mode="off"
    )
    weights = np.minimum(weight_of(np.exp(np.array(log_probs) + 1)), 1.5)
    assert gradient_of(log_probs, opd) == pytest.approx(plain * weights)


def test_the_term_is_added_to_the_estimators_advantages_and_measured_unclipped() -> None:
    log_probs = torch.tensor([-1.0, -20.0, -1.0])
    tokens = replace(
        tokens_at(log_probs, torch.tensor([-2.0, -20.5, -1.0]), torch.tensor([-2.0, -0.5, -40.0])),
        advantages=torch.tensor([0.5, -0.25, 0.0]),
    )
    taught = distilled(tokens, OpdConfig(coef=2.0))
    assert taught.advantages.tolist() == pytest.approx([0.5 - 2.0, -0.25 + 20.0, -20.0])
    assert taught.streams["teacher_kl"].tolist() == pytest.approx([1.0, -19.5, 39.0])
    assert taught.streams["teacher_clipped"].tolist() == [0.0, 1.0, 1.0]
    assert taught.streams["opd_weight"].tolist() == pytest.approx([np.e, np.exp(0.5), 1.0])
    capped = distilled(tokens, OpdConfig(importance="truncate", importance_cap=2.0))
    assert capped.streams["opd_weight"].tolist() == pytest.approx([np.e, np.exp(0.5), 1.0])
    unbounded = distilled(tokens, OpdConfig(clip=None))
    assert unbounded.advantages.tolist() == pytest.approx([-0.5, 19.25, -39.0])
    assert "teacher_clipped" not in unbounded.streams


def test_the_spread_of_importance_weights_is_that_over_all_tokens() -> None:
    weights = np.array([0.5, 1.0, 1.5, 3.0], np.float32)
    streams = {
        "opd_weight": weights,
        "old_log_probs": np.full(4, -1.0, np.float32),
        "log_probs": np.full(4, -1.0, np.float32),
        "importance_weight": np.ones(4, np.float32),
    }
    metrics = token_metrics(streams, np.ones(4, np.bool_), np.full(4, -1.0, np.float32))
    assert metrics["opd/importance_mean"] == pytest.approx(1.5)
    assert metrics["opd/importance_std"] == pytest.approx(np.sqrt((1 + 0.25 + 0 + 2.25) / 4))
    assert metrics["opd/importance_ess"] == pytest.approx(36 / (4 * 12.5))


def recorded_groups(rng: np.random.Generator) -> list[Group]:
    groups = [make_group(index, [None], rng=rng) for index in range(3)]
    for group in groups:
        for sample in group.samples:
            sample.teacher_log_probs = (-4 * rng.random(sample.response_length)).astype(np.float32)
    return groups


def half_square(how: Learner, groups: list[Group], length: int) -> Tensor:
    """½ Σ (log π_teacher − log π)² / (answers · length), without the trainer's code."""
    parts = []
    for group in groups:
        for sample in group.samples:
            start = len(sample.prompt_tokens)
            tokens = torch.tensor(sample.tokens.astype(np.int64))
            scores = torch.log_softmax(how.policy.model(tokens[None]).logits[0].double(), -1)
            own = scores[start - 1 : -1].gather(1, tokens[start:, None])[:, 0]
            teacher = torch.tensor(sample.teacher_log_probs, dtype=torch.float64)
            parts.append((teacher - own).square().sum() / 2)
    return torch.stack(parts).sum() / (len(parts) * length)


def test_the_gradient_is_that_of_half_the_squared_gap(rng: np.random.Generator) -> None:
    """∇J_off = E_ref Σ (log π_T − log π)·∇log π = ∇ −½ E_ref Σ (log π_T − log π)²."""
    how = learner(
        algorithm={
            "advantage": "none",
            "loss": "policy_gradient",
            "aggregation": "constant",
            "constant_length": 8,
        },
        opd={"mode": "offline", "data": "unused here", "clip": None},
    )
    groups = recorded_groups(rng)
    parameters = list(how.policy.model.parameters())
    before = [p.detach().clone() for p in parameters]
    gradients: list[Tensor] = []

    def catch(*_: object, **__: object) -> None:
        gradients.extend(p.grad.clone() for p in parameters if p.grad is not None)

    how.optimizer.register_step_pre_hook(catch)
    how.learn(groups, step=0, reward_key=None, max_new_tokens=8, temperature=1.0)

    def value_at(distance: float, directions: list[Tensor]) -> float:
        with torch.no_grad():
            for parameter, old, way in zip(parameters, before, directions, strict=True):
                parameter.copy_(old + distance * way)
            return float(half_square(how, groups, 8))

    # By finite differences, along the whole gradient and along those of single weights.
    for chosen in (range(len(parameters)), (0,), (3,), (7,)):
        way = [g if n in chosen else torch.zeros_like(g) for n, g in enumerate(gradients)]
        size = float(torch.cat([g.flatten() for g in way]).norm())
        way = [g / size for g in way]
        measured = (value_at(1e-3, way) - value_at(-1e-3, way)) / 2e-3
        assert measured == pytest.approx(size, rel=1e-3)
    # And exactly, by differentiating the definition.
    value_at(0.0, gradients)
    exact = torch.autograd.grad(half_square(how, groups, 8), parameters)
    for mine, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_steps_of_one_batch_use_the_policy_of_their_own_moment(rng: np.random.Generator) -> None:
    """Two optimizer steps on a batch: the second one's gaps are those after the first."""
    how = learner(
        algorithm={"advantage": "none", "loss": "policy_gradient"},
        opd={"mode": "offline", "data": "unused here"},
        global_batch_size=1,
    )
    groups = recorded_groups(rng)[:2]
    groups[1] = groups[0]
    sample = groups[0].samples[0]
    targets = np.arange(len(sample.prompt_tokens), len(sample.tokens))
    (first,) = score_sequences(
        how.policy,
        [TokenSequence(sample.tokens, targets, family=0)],
        budget=64,
        temperature=1.0,
        ranks=Ranks(),
    )
    metrics = how.learn(groups, step=0, reward_key=None, max_new_tokens=8, temperature=1.0)
    frozen = float((first - sample.teacher_log_probs).mean())
    assert abs(metrics["policy/teacher_kl"] - frozen) > 1e-4
