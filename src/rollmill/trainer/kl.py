"""Per-token estimators of KL(policy ‖ reference) from tokens that the policy sampled.

With d = log π(a) − log π_ref(a) and a ~ π (Schulman, "Approximating KL divergence", 2020):

- `k1`: d. Unbiased, high variance, can be negative.
- `k2`: d² / 2. Biased, but its gradient is that of the KL divergence on policy.
- `k3`: exp(−d) − 1 + d. Unbiased and never negative.
- `unbiased`: k3 times the ratio π / π_old, gradient through both (DeepSeek-V3.2, eq. 7): an
  unbiased value and gradient when the tokens come from π_old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.errors import ConfigError

KL_ESTIMATORS = ("k1", "k2", "k3", "unbiased")
"""Names that `kl_divergence` knows."""


def kl_divergence(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    estimator: str,
    *,
    log_ratio: Tensor | None = None,
) -> Tensor:
    """Per-token KL terms, same shape as `log_probs`.

    Args:
        log_probs: log-probs of the tokens under the policy.
        reference_log_probs: the same under the reference model; constants.
        estimator: one of `KL_ESTIMATORS`.
        log_ratio: log π − log π_old, for `unbiased`.

    Raises:
        ConfigError: unknown estimator, or `unbiased` without `log_ratio`.
    """
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    k3 = torch.expm1(-difference) + difference
    if estimator == "k3":
        return k3
    if estimator == "unbiased" and log_ratio is not None:
        return log_ratio.exp() * k3
    raise ConfigError(
        "the KL estimator cannot be used",
        where="trainer.algorithm.kl_estimator",
        expected=f"one of {', '.join(KL_ESTIMATORS)} (unbiased needs the old policy's log-probs)",
        found=estimator,
        fix="choose another trainer.algorithm.kl_estimator",
    )
