"""Parts of a training algorithm: each is one function and one entry of the configuration."""

import numpy as np
import torch

from rollmill.trainer.corrections import ImportanceWeights
from rollmill.trainer.losses import TokenLosses


def ranks(inputs, config):
    """`trainer.algorithm.advantage`: the place in the group, from -1 (worst) to 1 (best).

    How far apart rewards are does not matter; equal rewards share a place.
    """
    advantages = np.zeros(len(inputs.rewards))
    for group in np.unique(inputs.groups):
        (members,) = np.nonzero(inputs.groups == group)
        rewards = inputs.rewards[members]
        beaten = (rewards[:, None] > rewards).sum(1)
        lost_to = (rewards[:, None] < rewards).sum(1)
        advantages[members] = (beaten - lost_to) / max(len(members) - 1, 1)
    return inputs.broadcast(advantages)


def tapered(tokens, config):
    """`trainer.algorithm.loss`: TOPR (arXiv 2503.14286), with one ratio per token.

    Good answers are learned as they are. Bad ones lose influence as the policy leaves them:
    loss = -min(ratio, 1)·A·log pi for A < 0, with the ratio as a constant.
    """
    ratios = tokens.log_ratios.detach().exp()
    weights = torch.where(tokens.advantages < 0, ratios.clamp(max=1.0), torch.ones_like(ratios))
    return TokenLosses(-weights * tokens.advantages * tokens.log_probs, {"tapered": weights})


def root_length(step, config):
    """`trainer.algorithm.aggregation`: between `per_rollout` and `constant`.

    An attempt of L tokens counts √L times as much as one of a single token: not once, not L times.
    """
    lengths = np.bincount(step.attempts, minlength=step.num_attempts)
    return 1 / (step.num_attempts * np.sqrt(lengths[step.attempts]))


def one_sided(tokens, config):
    """`trainer.algorithm.importance_correction`: bounded from above only.

    `truncate` also lifts weights that are smaller than `importance_low`.
    """
    raw = (tokens.old_log_probs - tokens.rollout_log_probs).exp()
    return ImportanceWeights(raw, raw.clamp(max=config.importance_high))
