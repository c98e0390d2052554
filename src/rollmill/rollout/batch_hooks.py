"""The user's functions that see a whole batch: called in order, checked after each.

Policy: a function that changes what is trained on and raises, or breaks its contract, ends the
run with its name (training on half-changed data is worse than stopping). One that only reports
figures costs these and a warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollmill.errors import HookError
from rollmill.rewards.inputs import checked_reward
from rollmill.rollout.group import first_line
from rollmill.rollout.hooks import LoadedHooks
from rollmill.sample import Group, Sample, Status, flatten

logger = logging.getLogger(__name__)


def apply_batch_hooks(
    hooks: LoadedHooks, groups: list[Group], turned_down: list[Group]
) -> list[Group]:
    """Sample filter, reward post-processor, all-samples processor, batch converter, in that order.

    Args:
        hooks: the user's functions.
        groups: the batch, ascending by group index; its samples may be changed in place.
        turned_down: rejected and failed groups, for the all-samples processor.

    Returns:
        The groups to train on.

    Raises:
        HookError: a function raised, or left the batch in a state that cannot be trained on.
    """
    if hooks.sample_filter is not None:
        call_hook("sample_filter", hooks.sample_filter, groups)
    if hooks.reward_post_process is not None:
        call_hook("reward_post_process", hooks.reward_post_process, groups)
        _check_rewards(groups)
    if hooks.all_samples is not None:
        call_hook("all_samples", hooks.all_samples, groups, turned_down)
    if hooks.batch_converter is None:
        return groups
    converted = call_hook("batch_converter", hooks.batch_converter, list(groups))
    _check_converted(converted, groups)
    return list(converted)


def extra_metrics(
    hook: Callable[..., Mapping[str, float]] | None, *arguments_and_where: Any
) -> dict[str, float]:
    """Figures from a user's log function; none, and a warning, when it fails."""
    if hook is None:
        return {}
    *arguments, where = arguments_and_where
    try:
        figures = {str(name): float(value) for name, value in hook(*arguments).items()}
    except Exception as error:  # noqa: BLE001 - policy of this module
        logger.warning("%s failed, its figures are missing: %s", where, first_line(error))
        return {}
    return figures


def call_hook(name: str, hook: Callable[..., Any], *arguments: Any) -> Any:
    """What the hook returns; what it raises becomes a HookError that names it."""
    try:
        return hook(*arguments)
    except HookError:
        raise
    except Exception as error:
        raise HookError(
            "a function of yours raised",
            where=f"rollout.hooks.{name}",
            found=first_line(error),
            fix="the traceback above this error shows the line",
        ) from error


def _check_rewards(groups: Sequence[Group]) -> None:
    for sample in flatten(groups):
        if sample.status is Status.FAILED:
            continue
        problem = _reward_problem(sample)
        if problem is not None:
            raise HookError(
                "the reward post-processor left a sample without a usable reward",
                where=f"rollout.hooks.reward_post_process, sample {sample.index}",
                expected="a finite number, or a mapping from names to finite numbers",
                found=problem,
                fix="leave a finite number (or mapping of them) in sample.reward",
            )


def _reward_problem(sample: Sample) -> str | None:
    if sample.reward is None:
        return "None"
    if not isinstance(sample.reward, dict) and not math.isfinite(float(sample.reward)):
        return repr(sample.reward)
    try:
        checked_reward(sample.reward)
    except ValueError as error:
        return str(error)
    return None


def _check_converted(converted: object, groups: Sequence[Group]) -> None:
    """The books count groups and the loss counts attempts: a converter may not change either."""
    expected = [(g.group_index, [a[0].attempt for a in g.attempts()]) for g in groups]
    found: object = type(converted).__name__
    if isinstance(converted, Sequence) and all(isinstance(g, Group) for g in converted):
        found = [(g.group_index, [a[0].attempt for a in g.attempts()]) for g in converted]
    if found != expected:
        raise HookError(
            "the batch converter returned other groups or attempts than it was given",
            where="rollout.hooks.batch_converter",
            expected=f"the {len(groups)} groups in order, each with all its attempts",
            found=str(found)[:300],
            fix="change samples, or their number within an attempt; take samples out of the loss "
            "with in_loss = False",
        )
