"""Dynamic filters: whether one finished group is worth training on.

All of them see one reward per attempt (fan-out siblings counted once) and leave FAILED samples
out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollmill.config.rollout import FilterConfig
from rollmill.errors import ConfigError, HookError
from rollmill.filters.verdict import KEEP, Verdict
from rollmill.hooks import HookSignature, load_hook
from rollmill.sample import Group, Status, attempt_rewards

MIN_STD = 1e-6
"""Rewards closer together than this (float64) carry no signal; float noise is below it."""

BOUNDS = ("min_mean_reward", "max_mean_reward", "min_mean_length", "max_mean_length")
"""Fields of the configuration that are conditions by themselves."""

CustomFilter = Callable[[Group], "bool | tuple[bool, str] | Verdict"]
SIGNATURE = HookSignature(("group: Group",), "bool | tuple[bool, str]", "sync")


def nonzero_std(rewards: list[float]) -> Verdict:
    """Reject when the standard deviation of the rewards is at most 1e-6, in float64.

    The reason has their mean to one digit: reasons are names of metrics, so there must be few.
    """
    spread = float(np.std(np.asarray(rewards, np.float64)))
    return KEEP if spread > MIN_STD else Verdict(False, f"zero_std_{np.mean(rewards):.1g}")


class DynamicFilter:
    """The configured conditions, in order; the first that rejects gives the reason.

    Args:
        config: `rollout.filters`.
        reward_key: which part is the reward when rewards are mappings.
        base_dir: folder that relative hook files are looked up in.

    Raises:
        ConfigError: an unknown name.
        HookError: the custom function cannot be loaded or has the wrong parameters.
    """

    def __init__(self, config: FilterConfig, *, reward_key: str | None, base_dir: Path) -> None:
        self._config = config
        self._reward_key = reward_key
        self._custom: CustomFilter | None = None
        name = config.dynamic
        if name is not None and ":" in name:
            self._custom = load_hook(
                name, base_dir=base_dir, expected=SIGNATURE, name="rollout.filters.dynamic"
            )
        elif name not in (None, "nonzero_std"):
            raise ConfigError(
                "there is no such dynamic filter",
                where="rollout.filters.dynamic",
                expected="nonzero_std, or module:function",
                found=repr(name),
                fix="write nonzero_std, or a function of yours as file.py:function",
            )

    @property
    def name(self) -> str:
        """What to call it in messages: every condition that is set."""
        bounds = [name for name in BOUNDS if getattr(self._config, name) is not None]
        return ", ".join([*bounds, *filter(None, [self._config.dynamic])]) or "(none)"

    def __call__(self, group: Group) -> Verdict:
        """Judge one group of finished samples.

        Raises:
            ValueError: a condition on rewards is configured, and a sample has none.
        """
        live = Group(group.group_index, [s for s in group.samples if s.status is not Status.FAILED])
        if not live.samples:
            return Verdict(False, "all_failed")
        verdict = self._within_bounds(live)
        if not verdict.keep or self._config.dynamic is None:
            return verdict
        if self._custom is not None:
            return _as_verdict(self._custom(live), self._config.dynamic)
        return nonzero_std(attempt_rewards(live, self._reward_key))

    def _within_bounds(self, group: Group) -> Verdict:
        config = self._config
        low, high = config.min_mean_reward, config.max_mean_reward
        if low is not None or high is not None:
            mean = float(np.mean(attempt_rewards(group, self._reward_key)))
            if low is not None and mean < low:
                return Verdict(False, "mean_reward_low")
            if high is not None and mean > high:
                return Verdict(False, "mean_reward_high")
        length = group.num_response_tokens / len(group.attempts())
        if config.min_mean_length is not None and length < config.min_mean_length:
            return Verdict(False, "mean_length_low")
        if config.max_mean_length is not None and length > config.max_mean_length:
            return Verdict(False, "mean_length_high")
        return KEEP


def _as_verdict(answer: object, name: str) -> Verdict:
    if isinstance(answer, Verdict):
        return answer
    if isinstance(answer, (bool, np.bool_)):
        return KEEP if answer else Verdict(False, name.rpartition(":")[2])
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], str):
        return Verdict(bool(answer[0]), None if answer[0] else answer[1])
    raise HookError(
        "a dynamic filter returned something else than its answer",
        where=f"rollout.filters.dynamic ({name})",
        expected="True, False, or (False, 'reason')",
        found=repr(answer)[:200],
        fix="return whether the group is kept",
    )
