"""On-policy distillation: the teacher's view of each token as its advantage.

The advantage of a token is log π_teacher − log π with the *current* policy, detached, computed
inside every forward pass. It can therefore not be frozen at the values of the policy that sampled:
with those, the update never stops, wherever the student is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollmill.config.opd import OpdConfig
from rollmill.trainer.losses import TokenBatch


@dataclass(frozen=True)
class DistilledTokens:
    """Advantages with the distillation term, and what they were made of; every tensor is [T].

    Attributes:
        advantages: constants.
        streams: `teacher_kl` (log π − log π_teacher), `teacher_clipped` (1 where the bound was
            passed; absent without a bound) and `opd_weight` (w before truncation).
    """

    advantages: Tensor
    streams: dict[str, Tensor]


def distilled(tokens: TokenBatch, opd: OpdConfig) -> DistilledTokens:
    """A_t + coef · w_t · clip(log π_teacher − log π, ±τ) (Lightning OPD, arXiv 2604.13010, alg. 1).

    w is 1 unless `importance: truncate` asks for min(π / π_sampled, cap). Offline, with w = 1, the
    gradient of the summed loss is that of ½·Σ (log π_teacher − log π)² over the recorded tokens.

    Args:
        tokens: trainable tokens of whole samples, with the teacher's log-probs.
        opd: the `opd` section.
    """
    if tokens.teacher_log_probs is None:
        raise ValueError("on-policy distillation needs the teacher's log-probs")
    with torch.no_grad():
        gaps = tokens.log_probs - tokens.teacher_log_probs
        bounded = gaps if opd.clip is None else gaps.clamp(-opd.clip, opd.clip)
        weights = _importance(tokens, opd)
        streams = {"teacher_kl": gaps, "opd_weight": weights}
        if opd.clip is not None:
            streams["teacher_clipped"] = (gaps.abs() > opd.clip).to(gaps.dtype)
        if opd.importance == "truncate":
            bounded = bounded * weights.clamp(max=opd.importance_cap)
        return DistilledTokens(tokens.advantages - opd.coef * bounded, streams)


def _importance(tokens: TokenBatch, opd: OpdConfig) -> Tensor:
    """w = π / π_sampled per token, or per sample (the product over its tokens) on each of them."""
    log_weights = tokens.log_probs - tokens.rollout_log_probs
    if opd.importance == "truncate" and opd.importance_level == "sequence":
        log_weights = tokens.sequence_sums(log_weights)[tokens.sequences]
    return log_weights.exp()
