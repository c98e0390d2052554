"""Advantage estimators: rewards of attempts in, one advantage per response token out.

Pure numpy in float64; no model. An attempt is one answer to one prompt: samples that fan out of
one attempt share its reward and are counted once in every group statistic.

Invariants: attempts with identical rewards in a group get exactly 0 from the group-relative
estimators, and so does an attempt without company (the whitening estimators then shift them with
the batch: exactly 0 when the whole batch agrees). What lies under a mask has no influence: masked
tokens get 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.config.trainer import AlgorithmConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

GRPO_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""
WHITEN_EPSILON = 1e-8
"""Added to the variance when whitening over tokens."""


@dataclass(frozen=True)
class AdvantageInput:
    """What an estimator sees: one whole batch of rollouts.

    Attributes:
        rewards: float64 [A], one per attempt, KL penalty already taken off where it belongs to
            the whole answer.
        groups: int64 [A], which prompt each attempt answers.
        attempts: int64 [S], which attempt (0..A-1) each sample belongs to.
        masks: per sample, bool [R_s]: the response tokens in the loss.
        token_penalties: per sample, float64 [R_s], to be taken off the reward of each token (KL
            in the reward); None when there is none.
        values: per sample, float64 [R_s], the critic's value before each token; for `ppo`.
    """

    rewards: Floats
    groups: Ints
    attempts: Ints
    masks: Sequence[Bools]
    token_penalties: Sequence[Floats] | None = None
    values: Sequence[Floats] | None = None

    def broadcast(self, per_attempt: Floats) -> list[Floats]:
        """One value per attempt, on each of its samples' unmasked tokens; 0 under the mask."""
        return [
            np.where(mask, per_attempt[attempt], 0.0)
            for attempt, mask in zip(self.attempts, self.masks, strict=True)
        ]


Estimator = Callable[[AdvantageInput, AlgorithmConfig], Sequence[npt.NDArray[Any]]]
"""Returns one vector per sample, one entry per response token."""


def group_centered(rewards: Floats, groups: Ints) -> Floats:
    """r − mean of the group; exactly 0 where the group's rewards are identical."""
    centered = np.zeros_like(rewards, dtype=np.float64)
    for members in _members(groups):
        inside = rewards[members]
        if np.ptp(inside) > 0:
            centered[members] = inside - inside.mean()
    return centered


def grpo(rewards: Floats, groups: Ints, *, normalize_std: bool = True) -> Floats:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, §4.1.2).

    A = (r − mean) / (std + 1e-6), with the unbiased std over the group's attempts; without
    `normalize_std` just r − mean. A singleton or a group of identical rewards gets 0.

    Args:
        rewards: float64 [A].
        groups: int64 [A].
        normalize_std: divide by the standard deviation.
    """
    centered = group_centered(rewards, groups)
    if not normalize_std:
        return centered
    for members in _members(groups):
        if len(members) > 1:
            centered[members] /= rewards[members].std(ddof=1) + GRPO_EPSILON
    return centered


def dr_grpo(rewards: Floats, groups: Ints) -> Floats:
    """A = r − mean of the group (Dr. GRPO, arXiv 2503.20783): no division by the std."""
    return group_centered(rewards, groups)


def rloo(rewards: Floats, groups: Ints) -> Floats:
    """A_i = r_i − mean of the group's other rewards (RLOO, arXiv 2402.14740, eq. 7).

    Computed as n / (n − 1) · (r_i − mean), which is the same.
    """
    centered = group_centered(rewards, groups)
    for members in _members(groups):
        if len(members) > 1:
            centered[members] *= len(members) / (len(members) - 1)
    return centered


def reinforce_plus_plus(inputs: AdvantageInput, *, gamma: float) -> list[Floats]:
    """REINFORCE++ (arXiv 2501.03262): whitened discounted returns per token.

    The reward sits on the last unmasked token of each sample, token penalties on theirs;
    G_t = r_t + γ·G_{t+1} over unmasked tokens only; then whitened over the whole batch.
    """
    returns = [
        discounted_returns(rewards, mask, gamma=gamma)
        for rewards, mask in zip(token_rewards(inputs), inputs.masks, strict=True)
    ]
    return whiten(returns, inputs.masks)


def ppo(inputs: AdvantageInput, *, gamma: float, lam: float) -> tuple[list[Floats], list[Floats]]:
    """PPO with a critic: whitened generalized advantages, and the critic's targets.

    The reward sits on the last unmasked token of each sample, token penalties on theirs; GAE runs
    over unmasked tokens only (`gae`); targets are not whitened.
    """
    if inputs.values is None:
        raise ValueError("the ppo estimator needs the critic's values")
    pairs = [
        gae(rewards, values, mask, gamma=gamma, lam=lam)
        for rewards, values, mask in zip(
            token_rewards(inputs), inputs.values, inputs.masks, strict=True
        )
    ]
    return whiten([pair[0] for pair in pairs], inputs.masks), [pair[1] for pair in pairs]


def token_rewards(inputs: AdvantageInput) -> list[Floats]:
    """Per sample, [R_s]: its attempt's reward on its last unmasked token, minus the penalties."""
    rewards = []
    for number, mask in enumerate(inputs.masks):
        per_token = np.zeros(len(mask))
        if inputs.token_penalties is not None:
            per_token -= inputs.token_penalties[number]
        (unmasked,) = mask.nonzero()
        if len(unmasked):
            per_token[unmasked[-1]] += inputs.rewards[inputs.attempts[number]]
        rewards.append(per_token)
    return rewards


def reinforce_plus_plus_baseline(inputs: AdvantageInput) -> list[Floats]:
    """REINFORCE++ with baseline (arXiv 2501.03262, §3): r − group mean, whitened over tokens."""
    centered = group_centered(inputs.rewards, inputs.groups)
    return whiten(inputs.broadcast(centered), inputs.masks)


def discounted_returns(token_rewards: Floats, mask: Bools, *, gamma: float) -> Floats:
    """G_t = r_t + γ·G_{t+1} over unmasked tokens: masked ones take no time and get 0."""
    returns = np.zeros(len(mask))
    running = 0.0
    for position in mask.nonzero()[0][::-1]:
        running = token_rewards[position] + gamma * running
        returns[position] = running
    return returns


def gae(
    token_rewards: Floats, values: Floats, mask: Bools, *, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """Generalized advantage estimation (arXiv 1506.02438) over the unmasked tokens of a sample.

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}, where t + 1 is the next *unmasked*
    token and both are 0 past the last one.

    Returns:
        Advantages and value targets A + V, both [R], 0 under the mask.
    """
    advantages, targets = np.zeros(len(mask)), np.zeros(len(mask))
    next_value = next_advantage = 0.0
    for position in mask.nonzero()[0][::-1]:
        delta = token_rewards[position] + gamma * next_value - values[position]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[position]
        advantages[position] = next_advantage
        targets[position] = next_advantage + values[position]
    return advantages, targets


def whiten(values: Sequence[Floats], masks: Sequence[Bools]) -> list[Floats]:
    """(x − mean) / sqrt(var + 1e-8) over all unmasked tokens of the batch; masked ones get 0.

    Args:
        values: per sample, float64 [R_s].
        masks: per sample, bool [R_s].
    """
    inside = np.concatenate(
        [value[mask] for value, mask in zip(values, masks, strict=True)] or [np.zeros(0)]
    )
    if len(inside) == 0:
        return [np.zeros(len(mask)) for mask in masks]
    mean = inside.mean() if np.ptp(inside) > 0 else inside[0]
    scale = np.sqrt(inside.var() + WHITEN_EPSILON)
    return [
        np.where(mask, (value - mean) / scale, 0.0)
        for value, mask in zip(values, masks, strict=True)
    ]


def _members(groups: Ints) -> list[Ints]:
    """Positions of each group's attempts."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order])) + 1
    return [part for part in np.split(order, starts) if len(part)]


def _grpo(inputs: AdvantageInput, config: AlgorithmConfig) -> list[Floats]:
    advantages = grpo(inputs.rewards, inputs.groups, normalize_std=config.normalize_std)
    return inputs.broadcast(advantages)


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": _grpo,
        "gspo": _grpo,
        "cispo": _grpo,
        "dr_grpo": lambda inputs, _: inputs.broadcast(dr_grpo(inputs.rewards, inputs.groups)),
        "rloo": lambda inputs, _: inputs.broadcast(rloo(inputs.rewards, inputs.groups)),
        "reinforce_plus_plus": lambda inputs, c: reinforce_plus_plus(inputs, gamma=c.gamma),
        "reinforce_plus_plus_baseline": lambda inputs, _: reinforce_plus_plus_baseline(inputs),
        "ppo": lambda inputs, c: ppo(inputs, gamma=c.gamma, lam=c.gae_lambda)[0],
        "none": lambda inputs, _: inputs.broadcast(np.zeros(len(inputs.rewards))),
    }
)
"""Estimators by their name in the configuration."""

PER_TOKEN_REWARD = frozenset({"reinforce_plus_plus", "ppo"})
"""Estimators that take token penalties; the others see them summed into the reward."""

NEEDS_CRITIC = frozenset({"ppo"})
"""Estimators that need `AdvantageInput.values`."""

NEEDS_NO_REWARD = frozenset({"none"})
"""Estimators that work on samples without a reward."""
