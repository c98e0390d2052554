"""Rewards that users write: `def reward(sample: RewardInput) -> float | dict[str, float] | None`.

Plain or `async`. With `per_group` the function gets all answers to one prompt and returns one
reward per answer. `None` means that no answer was found. They run in the same killable processes
as the built-in types, so they may be slow, hang or crash without harming the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rollmill.hooks import HookSignature, is_coroutine_hook, load_hook
from rollmill.rewards.inputs import RewardInput, checked_reward
from rollmill.sample import Reward

ONE = HookSignature(("sample: RewardInput",), "float | dict[str, float] | None")
GROUP = HookSignature(("samples: list[RewardInput]",), "list[float | dict[str, float] | None]")
_NO_LIST = (str, bytes, Mapping, Set)
"""Have a length, but no order that could be the answers'."""


def is_function_path(name: str) -> bool:
    """Whether a reward's name is a path to a function (`module:function`), not a type."""
    return ":" in name


def load_function(
    path: str, base_dir: Path, *, per_group: bool = False, name: str = "reward.function"
) -> Callable[..., Any]:
    """The reward function that `path` names.

    Raises:
        HookError: it does not exist, or does not take what a reward function is given.
    """
    return load_hook(path, base_dir=base_dir, expected=GROUP if per_group else ONE, name=name)


class CustomReward:
    """A loaded reward function: calls it and checks what it returns."""

    def __init__(self, path: str, base_dir: Path, *, per_group: bool = False) -> None:
        self.path = path
        self.per_group = per_group
        self._function = load_function(path, base_dir, per_group=per_group)
        self.is_async = is_coroutine_hook(self._function)

    def call(self, inputs: Sequence[RewardInput]) -> list[Reward | None]:
        """One reward per input.

        Raises:
            ValueError: the function returned something else than its hook requires.
            Exception: whatever the function raises.
        """
        return self._checked(self._function(self._argument(inputs)), len(inputs))

    async def call_async(self, inputs: Sequence[RewardInput]) -> list[Reward | None]:
        """`call` for a coroutine function."""
        return self._checked(await self._function(self._argument(inputs)), len(inputs))

    def _argument(self, inputs: Sequence[RewardInput]) -> RewardInput | list[RewardInput]:
        return list(inputs) if self.per_group else inputs[0]

    def _checked(self, value: Any, num_answers: int) -> list[Reward | None]:
        if inspect.isawaitable(value):
            raise ValueError("expected a reward, found an awaitable: declare it `async def`")
        if not self.per_group:
            return [checked_reward(value)]
        if isinstance(value, _NO_LIST) or not hasattr(value, "__len__"):
            raise ValueError(
                f"expected a list with one reward per answer, found {type(value).__name__}"
            )
        if len(value) != num_answers:
            raise ValueError(f"expected {num_answers} rewards, found {len(value)}")
        return [checked_reward(one) for one in value]
