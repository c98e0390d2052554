"""Policy losses: one loss per trainable token.

A loss sees only trainable tokens, of whole samples, laid end to end (`TokenBatch`): what lies
under the mask cannot reach it. It returns one loss per token; weights, KL, entropy, importance
correction and the sum are `objective`'s and `aggregation`'s business. A new loss is one function
here and one entry in `LOSSES`, or `module:function` in the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from rollmill.config.trainer import AlgorithmConfig


@dataclass(frozen=True)
class TokenBatch:
    """The trainable tokens of some samples, end to end. Every tensor is [T].

    Attributes:
        log_probs: under the current policy, with gradient.
        old_log_probs: under the policy at the start of the step; constants.
        rollout_log_probs: as the engine reported them when sampling; constants.
        advantages: constants.
        sequences: int64, which sample (0..num_sequences-1) each token belongs to.
        num_sequences: samples in this batch.
        entropies: of the policy's next-token distribution, when the objective needs them.
        reference_log_probs: under the reference model, when there is one; constants.
        teacher_log_probs: under the teacher, when there is one; constants.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    sequences: Tensor
    num_sequences: int
    entropies: Tensor | None = None
    reference_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None

    @property
    def log_ratios(self) -> Tensor:
        """log π − log π_old, with gradient."""
        return self.log_probs - self.old_log_probs

    def sequence_sums(self, values: Tensor) -> Tensor:
        """[num_sequences]: the sum of `values` over each sample's tokens."""
        sums = values.new_zeros(self.num_sequences)
        return sums.index_add(0, self.sequences, values)

    def sequence_means(self, values: Tensor) -> Tensor:
        """[num_sequences]: the mean of `values` over each sample's tokens (0 without tokens)."""
        counts = self.sequence_sums(torch.ones_like(values)).clamp(min=1)
        return self.sequence_sums(values) / counts


@dataclass(frozen=True)
class TokenLosses:
    """A policy loss and what it wants measured; every tensor is [T].

    Attributes:
        losses: one loss per token, with gradient.
        streams: detached values per token, averaged over tokens into the metrics by name.
    """

    losses: Tensor
    streams: Mapping[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[[TokenBatch, AlgorithmConfig], TokenLosses]
"""What a loss must be."""


def ppo_clip(tokens: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO) and dual clip.

    loss = −min(r·A, clip(r, 1 − low, 1 + high)·A), r = π / π_old. With `dual_clip` = c
    (arXiv 1912.09729, eq. 3) the loss of a negative advantage is at most −c·A.
    """
    return _clipped(tokens.log_ratios.exp(), tokens, config)


def gspo(tokens: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """GSPO (arXiv 2507.18071, eq. 5–7): PPO's clip on one ratio per sample.

    s = exp(mean over the sample's tokens of log π − log π_old), given to each of its tokens; the
    gradient is that of the sequence-level loss when the tokens are averaged per sample.
    """
    mean_log_ratios = tokens.sequence_means(tokens.log_ratios)
    return _clipped(mean_log_ratios.exp()[tokens.sequences], tokens, config)


def cispo(tokens: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4–5): clip the weight, keep every gradient.

    loss = −stop_gradient(clip(r, 1 − low, 1 + high)) · A · log π.
    """
    ratios = tokens.log_ratios.detach().exp()
    weights = ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    streams = {"ratio": ratios, "clipped": (weights != ratios).to(ratios.dtype)}
    return TokenLosses(-weights * tokens.advantages * tokens.log_probs, streams)


def policy_gradient(tokens: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """REINFORCE: loss = −A · log π. No ratio, no clip."""
    return TokenLosses(-tokens.advantages * tokens.log_probs)


def sft(tokens: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    """Negative log-likelihood: loss = −log π. Advantages are not looked at."""
    losses = -tokens.log_probs
    return TokenLosses(losses, {"nll": losses.detach()})


def _clipped(ratios: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
    advantages = tokens.advantages
    free = ratios * advantages
    bounded = ratios.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    surrogate = torch.minimum(free, bounded)
    clipped = bounded < free
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        is_below = (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(is_below, floor, surrogate)
        clipped = clipped | is_below
    streams = {"ratio": ratios.detach(), "clipped": clipped.to(ratios.dtype)}
    return TokenLosses(-surrogate, streams)


LOSSES: Mapping[str, LossFunction] = MappingProxyType(
    {
        "ppo_clip": ppo_clip,
        "gspo": gspo,
        "cispo": cispo,
        "policy_gradient": policy_gradient,
        "sft": sft,
    }
)
"""Losses by their name in the configuration."""

SCALES_WITH_ADVANTAGE = frozenset({"ppo_clip", "gspo", "cispo", "policy_gradient"})
"""Losses whose gradient is exactly 0 where every advantage of the sample is 0."""
