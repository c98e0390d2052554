"""Over-sampling filters: rank more groups than a batch holds and keep the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rollmill.errors import ConfigError, HookError
from rollmill.hooks import HookSignature, load_hook
from rollmill.sample import Group, Status, attempt_rewards

Ranking = Callable[[Sequence[Group]], Sequence[Group]]
SIGNATURE = HookSignature(("groups: list[Group]",), "list[Group]", "sync")


def by_reward_std(groups: Sequence[Group], reward_key: str | None) -> list[Group]:
    """Largest reward spread first (standard deviation over attempts, float64); ties in order."""
    return sorted(groups, key=lambda group: -_reward_std(group, reward_key))


def _reward_std(group: Group, reward_key: str | None) -> float:
    live = [s for s in group.samples if s.status is not Status.FAILED]
    if not live:
        return 0.0
    rewards = attempt_rewards(Group(group.group_index, live), reward_key)
    return float(np.std(np.asarray(rewards, np.float64)))


def load_ranking(name: str | None, *, reward_key: str | None, base_dir: Path) -> Ranking | None:
    """The configured ranking; None when there is none.

    Raises:
        ConfigError: an unknown name.
        HookError: the custom function cannot be loaded or has the wrong parameters.
    """
    where = "rollout.filters.over_sampling"
    if name is None:
        return None
    if name == "by_reward_std":
        return lambda groups: by_reward_std(groups, reward_key)
    if ":" not in name:
        raise ConfigError(
            "there is no such over-sampling filter",
            where=where,
            expected="by_reward_std, or module:function",
            found=repr(name),
            fix="write by_reward_std, or a function of yours as file.py:function",
        )
    custom = load_hook(name, base_dir=base_dir, expected=SIGNATURE, name=where)

    def checked(groups: Sequence[Group]) -> Sequence[Group]:
        try:
            ranked = list(custom(list(groups)))
        except HookError:
            raise
        except Exception as error:
            raise HookError(
                "an over-sampling filter raised, or returned no list",
                where=f"{where} ({name})",
                expected="the groups it was given, ordered, each at most once",
                found=f"{type(error).__name__}: {error}",
                fix="mend the function: nobody else can say which groups are trained on",
            ) from error
        if {id(g) for g in ranked} - {id(g) for g in groups} or len({id(g) for g in ranked}) != len(
            ranked
        ):
            raise HookError(
                "an over-sampling filter returned groups that it was not given, or one twice",
                where=f"{where} ({name})",
                expected="the groups it was given, ordered, each at most once",
                fix="return a sorted or shortened list of the groups themselves",
            )
        return ranked

    return checked
