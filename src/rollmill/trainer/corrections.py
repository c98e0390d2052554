"""Corrections for tokens that another policy sampled: importance weights and sequence masks.

The engine that sampled a token and the trainer that learns from it disagree a little (other
kernels, another precision), or a lot (older weights). All weights here are constants: no gradient
flows through them. Metrics are taken before anything is truncated or masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from rollmill.config.trainer import AlgorithmConfig
from rollmill.trainer.losses import TokenBatch


@dataclass(frozen=True)
class ImportanceWeights:
    """Engine-to-trainer importance weights; both [T], without gradient.

    Attributes:
        raw: π_old / π_rollout, at the level the configuration names.
        applied: what the loss is multiplied by.
    """

    raw: Tensor
    applied: Tensor


Correction = Callable[[TokenBatch, AlgorithmConfig], ImportanceWeights]
"""What an importance correction must be."""


def uncorrected(tokens: TokenBatch, config: AlgorithmConfig) -> ImportanceWeights:
    """1; `raw` is still measured, per token."""
    with torch.no_grad():
        raw = (tokens.old_log_probs - tokens.rollout_log_probs).exp()
        return ImportanceWeights(raw, torch.ones_like(raw))


def truncated(tokens: TokenBatch, config: AlgorithmConfig) -> ImportanceWeights:
    """clamp(w, low, high): truncated importance sampling. w as in `raw_weights`."""
    raw = raw_weights(tokens, config)
    return ImportanceWeights(raw, raw.clamp(config.importance_low, config.importance_high))


def masked(tokens: TokenBatch, config: AlgorithmConfig) -> ImportanceWeights:
    """w inside [low, high], 0 outside: IcePop, and its sequence forms. w as in `raw_weights`."""
    raw = raw_weights(tokens, config)
    inside = (raw >= config.importance_low) & (raw <= config.importance_high)
    return ImportanceWeights(raw, torch.where(inside, raw, torch.zeros_like(raw)))


CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {"none": uncorrected, "truncate": truncated, "mask": masked}
)
"""Importance corrections by their name in the configuration."""


def raw_weights(tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """π_old / π_rollout [T] at `importance_level`, without gradient.

    - `token`: w_t = exp(log π_old − log π_rollout).
    - `sequence`: the product of the sample's w_t, on each of its tokens.
    - `geometric`: their geometric mean.
    """
    with torch.no_grad():
        gaps = tokens.old_log_probs - tokens.rollout_log_probs
        return _at_level(gaps, tokens, config.importance_level).exp()


def _at_level(gaps: Tensor, tokens: TokenBatch, level: str) -> Tensor:
    if level == "sequence":
        return tokens.sequence_sums(gaps)[tokens.sequences]
    if level == "geometric":
        return tokens.sequence_means(gaps)[tokens.sequences]
    return gaps


def off_policy_mask(tokens: TokenBatch, delta: float) -> Tensor:
    """[T], 1 or 0: 0 for sequences to leave out (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    A sequence leaves when its advantage is negative and the mean over its tokens of
    log π_rollout − log π is above `delta`. The log-probs are those that the engine reported, as in
    the paper: so both count, older weights and the engine's own arithmetic. (Against the policy at
    the start of the call, nothing would leave at its first optimizer step.) A sequence's advantage
    is the mean of its tokens'.
    """
    with torch.no_grad():
        drift = tokens.sequence_means(tokens.rollout_log_probs - tokens.log_probs)
        advantage = tokens.sequence_means(tokens.advantages)
        leaves = (advantage < 0) & (drift > delta)
        return (~leaves)[tokens.sequences].to(tokens.log_probs.dtype)
