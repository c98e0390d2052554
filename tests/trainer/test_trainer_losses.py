"""Losses, corrections, KL and the objective against vectors worked by hand, and identities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollmill.config.opd import OpdConfig
from rollmill.config.trainer import AlgorithmConfig
from rollmill.errors import ConfigError
from rollmill.trainer.corrections import CORRECTIONS, off_policy_mask
from rollmill.trainer.kl import kl_divergence
from rollmill.trainer.losses import LOSSES, TokenBatch, cispo, gspo, policy_gradient, ppo_clip, sft
from rollmill.trainer.objective import objective

LOG2 = math.log(2)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(
    log_ratios: Tensor,
    advantages: Tensor,
    sequences: list[int] | None = None,
    *,
    gaps: Tensor | None = None,
    **extra: Tensor | None,
) -> TokenBatch:
    """Tokens with the given log π − log π_old, and log π_old − log π_rollout (0 by default)."""
    old = torch.full_like(log_ratios, -1.5)
    numbers = sequences or [0] * len(log_ratios)
    return TokenBatch(
        log_probs=(old + log_ratios).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old if gaps is None else old - gaps,
        advantages=advantages,
        sequences=torch.tensor(numbers),
        num_sequences=max(numbers) + 1,
        **extra,
    )


def gradient(tokens: TokenBatch, losses: Tensor) -> list[float]:
    (grad,) = torch.autograd.grad(losses.sum(), tokens.log_probs)
    return grad.tolist()


def test_ppo_clip_by_hand() -> None:
    # Ratios 1, 2, 0.5, 2, 0.5; bounds 0.8 and 1.28.
    # A = 1:  −1; −min(2, 1.28) = −1.28 (clipped); −min(0.5, 0.8) = −0.5 (not clipped).
    # A = −1: −min(−2, −1.28) = 2 (not clipped); −min(−0.5, −0.8) = 0.8 (clipped).
    tokens = batch(vector(0, LOG2, -LOG2, LOG2, -LOG2), vector(1, 1, 1, -1, -1))
    result = ppo_clip(tokens, AlgorithmConfig())
    assert result.losses.tolist() == pytest.approx([-1, -1.28, -0.5, 2, 0.8])
    assert result.streams["clipped"].tolist() == [0, 1, 0, 0, 1]
    # d(−r·A)/d log π = −r·A where not clipped, 0 where clipped.
    assert gradient(tokens, result.losses) == pytest.approx([-1, 0, -0.5, 2, 0])


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    # Ratio 8, A = −1: the surrogate −8 is below 3·A = −3, so the loss is 3 and has no gradient.
    tokens = batch(vector(3 * LOG2, LOG2), vector(-1, -1))
    result = ppo_clip(tokens, AlgorithmConfig(dual_clip=3.0))
    assert result.losses.tolist() == pytest.approx([3, 2])
    assert gradient(tokens, result.losses) == pytest.approx([0, 2])


def test_gspo_by_hand() -> None:
    # Sequence 0: log-ratios log 2 and 0, mean ½ log 2, ratio √2 = 1.414 > 1.28: clipped for A = 1.
    # Sequence 1: log-ratio −log 2, ratio 0.5, A = −2: −min(−1, −1.6) = 1.6, clipped.
    # Sequence 2: log-ratios ±0.1: ratio 1.
    tokens = batch(
        vector(LOG2, 0, -LOG2, 0.1, -0.1), vector(1, 1, -2, 3, 3), sequences=[0, 0, 1, 2, 2]
    )
    result = gspo(tokens, AlgorithmConfig())
    assert result.losses.tolist() == pytest.approx([-1.28, -1.28, 1.6, -3, -3])
    # Sequence 2: d/d log π of −1·3 on two tokens, each feels half of both: −3.
    assert gradient(tokens, result.losses) == pytest.approx([0, 0, 0, -3, -3])


def test_gspo_is_ppo_at_length_one() -> None:
    tokens = batch(vector(0.3, -0.4, 0.1), vector(1, -2, 0.5), sequences=[0, 1, 2])
    first, second = gspo(tokens, AlgorithmConfig()), ppo_clip(tokens, AlgorithmConfig())
    assert torch.equal(first.losses, second.losses)
    assert gradient(tokens, first.losses) == gradient(tokens, second.losses)


def test_cispo_by_hand() -> None:
    # Ratio 2 is clipped to 1.28, the gradient stays: −1.28·A = −1.28 per unit of log π.
    tokens = batch(vector(LOG2, 0), vector(1, -3))
    result = cispo(tokens, AlgorithmConfig())
    log_probs = tokens.log_probs.tolist()
    assert result.losses.tolist() == pytest.approx([-1.28 * log_probs[0], 3 * log_probs[1]])
    assert gradient(tokens, result.losses) == pytest.approx([-1.28, 3])


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo"])
def test_on_policy_every_ratio_loss_has_the_policy_gradient(name: str) -> None:
    # GSPO shares a sequence's gradient among its tokens, so with one advantage per sequence the
    # gradient is that of policy gradient too.
    tokens = batch(vector(0, 0, 0), vector(0.7, 0.7, -1.2), sequences=[0, 0, 1])
    losses = LOSSES[name](tokens, AlgorithmConfig()).losses
    expected = policy_gradient(tokens, AlgorithmConfig()).losses
    assert gradient(tokens, losses) == pytest.approx(gradient(tokens, expected))


def test_sft_is_the_negative_log_likelihood() -> None:
    tokens = batch(vector(0.5, -0.5), vector(0, 0))
    assert torch.equal(sft(tokens, AlgorithmConfig()).losses, -tokens.log_probs)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [LOG2, 0]),
        ("k2", [LOG2**2 / 2, 0]),
        ("k3", [0.5 - 1 + LOG2, 0]),
        ("unbiased", [2 * (0.5 - 1 + LOG2), 0]),
    ],
)
def test_kl_by_hand(estimator: str, expected: list[float]) -> None:
    # log π − log π_ref = log 2 and 0; the ratio to the old policy is 2.
    log_probs = vector(-1, -1)
    kl = kl_divergence(
        log_probs, log_probs - vector(LOG2, 0), estimator, log_ratio=vector(LOG2, LOG2)
    )
    assert kl.tolist() == pytest.approx(expected)


def test_kl_estimators_agree_with_the_divergence_in_expectation() -> None:
    policy, reference = vector(0.5, 0.3, 0.2), vector(0.2, 0.3, 0.5)
    exact = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        terms = kl_divergence(policy.log(), reference.log(), estimator)
        assert (policy * terms).sum().item() == pytest.approx(exact.item())


def test_unbiased_kl_has_the_gradient_of_the_divergence_off_policy() -> None:
    logits = vector(0.4, -0.1, 0.3).requires_grad_()
    old, reference = vector(0.2, 0.5, 0.3), vector(0.2, 0.3, 0.5)
    log_policy = logits.log_softmax(0)
    terms = kl_divergence(log_policy, reference.log(), "unbiased", log_ratio=log_policy - old.log())
    (ours,) = torch.autograd.grad((old * terms).sum(), logits, retain_graph=True)
    exact = (log_policy.exp() * (log_policy - reference.log())).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    assert ours.tolist() == pytest.approx(expected.tolist())


def test_an_unknown_kl_estimator_is_named() -> None:
    with pytest.raises(ConfigError, match="k9"):
        kl_divergence(vector(0), vector(0), "k9")


@pytest.mark.parametrize(
    ("changes", "raw", "applied"),
    [
        # Gaps log π_old − log π_rollout: sequence 0: log 2, log 4; sequence 1: −log 4.
        ({"importance_correction": "none"}, [2, 4, 0.25], [1, 1, 1]),
        ({"importance_correction": "truncate"}, [2, 4, 0.25], [2, 2, 0.5]),
        ({"importance_correction": "mask"}, [2, 4, 0.25], [2, 0, 0]),
        (
            {"importance_correction": "truncate", "importance_level": "sequence"},
            [8, 8, 0.25],
            [2, 2, 0.5],
        ),
        (
            {"importance_correction": "mask", "importance_level": "geometric"},
            [math.sqrt(8), math.sqrt(8), 0.25],
            [0, 0, 0],
        ),
        (
            {
                "importance_correction": "mask",
                "importance_level": "geometric",
                "importance_high": 3.0,
            },
            [math.sqrt(8), math.sqrt(8), 0.25],
            [math.sqrt(8), math.sqrt(8), 0],
        ),
    ],
)
def test_importance_weights_by_hand(
    changes: dict[str, object], raw: list[float], applied: list[float]
) -> None:
    tokens = batch(
        vector(0, 0, 0), vector(1, 1, 1), [0, 0, 1], gaps=vector(LOG2, 2 * LOG2, -2 * LOG2)
    )
    config = AlgorithmConfig.model_validate(changes)
    weights = CORRECTIONS[config.importance_correction](tokens, config)
    assert weights.raw.tolist() == pytest.approx(raw)
    assert weights.applied.tolist() == pytest.approx(applied)


def test_off_policy_masking_drops_only_drifted_negative_sequences() -> None:
    # Mean of log π_rollout − log π: 0.4, 0.4, 0.1. Only the first is negative *and* beyond 0.2.
    tokens = batch(
        vector(0, 0, 0, 0),  # the policy is that of the start of the call: its first step
        vector(-1, -1, 1, -1),
        sequences=[0, 0, 1, 2],
        gaps=vector(-0.5, -0.3, -0.4, -0.1),
    )
    assert off_policy_mask(tokens, 0.2).tolist() == [0, 0, 1, 1]


def test_the_objective_adds_its_parts() -> None:
    # Ratio 1, A = 1: policy loss −1, importance weight 2 → −2. KL k1 to the reference: 0.5·0.1.
    # Entropy 3 with coefficient 0.01: −0.03.
    tokens = batch(
        vector(0),
        vector(1),
        gaps=vector(LOG2),
        reference_log_probs=vector(-2.0),
        entropies=vector(3.0),
    )
    config = AlgorithmConfig(
        importance_correction="truncate", kl_coef=0.1, kl_estimator="k1", entropy_coef=0.01
    )
    result = objective(tokens, config, ppo_clip)
    assert result.losses.tolist() == pytest.approx([-2 + 0.05 - 0.03])
    assert result.streams["reference_kl"].tolist() == pytest.approx([0.5])
    assert result.streams["importance_weight"].tolist() == pytest.approx([2])


def test_no_gradient_flows_through_weights_and_masks() -> None:
    tokens = batch(vector(0.0, -0.5), vector(1, 1), [0, 1], gaps=vector(0.3, 0.3))
    config = AlgorithmConfig(importance_correction="truncate", off_policy_mask_delta=0.1)
    losses = objective(tokens, config, policy_gradient).losses
    weight = math.exp(0.3)
    assert gradient(tokens, losses) == pytest.approx([-weight, -weight])


def test_distillation_takes_the_clipped_reverse_kl_off_the_advantage() -> None:
    # log π = −1.5; teacher −1.0 and −6.5: gaps −0.5 and 5 (clipped to 2).
    # A = 1 − 0.5·(−0.5) = 1.25 and 1 − 0.5·2 = 0; the gradient is −A.
    tokens = batch(vector(0, 0), vector(1, 1), teacher_log_probs=vector(-1.0, -6.5))
    opd = OpdConfig(coef=0.5, clip=2.0)
    result = objective(tokens, AlgorithmConfig(loss="policy_gradient"), policy_gradient, opd)
    assert gradient(tokens, result.losses) == pytest.approx([-1.25, 0])
    assert result.streams["teacher_kl"].tolist() == pytest.approx([-0.5, 5])
    assert result.streams["teacher_clipped"].tolist() == [0, 1]
