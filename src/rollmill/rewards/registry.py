"""From the name of a reward to the grader that gives it.

Names: a built-in type, `boxed_` and a built-in type, or a path to a user's function. Settings come
from `reward.params`: flat for the configured type, or one mapping per type under its name.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rollmill.config.reward import RewardConfig
from rollmill.errors import RewardError
from rollmill.rewards.functions import CustomReward, is_function_path
from rollmill.rewards.graders.base import Grader, Params, Score
from rollmill.rewards.inputs import RewardInput

BOXED = "boxed_"
REMOTE = "remote"
TYPES = ("math", "deepscaler", "dapo", "f1", "gpqa", "ifbench", "remote", "code", "random")
"""The built-in types."""


def base_type(name: str) -> str:
    """The type without its `boxed_` prefix."""
    return name.removeprefix(BOXED)


def is_type(name: str) -> bool:
    """Whether `name` is a built-in type, boxed or not."""
    return base_type(name) in TYPES


def reward_names(config: RewardConfig) -> list[str]:
    """The rewards of a run: its type, its function, or the names in `weights`."""
    if config.weights:
        return list(config.weights)
    return [name for name in (config.type, config.function) if name is not None]


def check_names(config: RewardConfig) -> None:
    """Raise RewardError for a reward that does not exist."""
    for name in reward_names(config):
        if not is_function_path(name) and not is_type(name):
            raise unknown_type(name, "reward.type" if name == config.type else _place(config))


def _place(config: RewardConfig) -> str:
    return "reward.weights" if config.weights else "reward.function"


def unknown_type(name: str, where: str = "reward.type") -> RewardError:
    """The error for a name that is no reward."""
    if name.endswith(".py") or where == "reward.function":
        return RewardError(
            "a function is named by its file or module and its name",
            where=where,
            expected="`file.py:function` or `module:function`",
            found=repr(name),
            fix=f"write the function's name after a colon: {name}:reward",
        )
    known = [*TYPES, *(BOXED + one for one in TYPES)]
    close = difflib.get_close_matches(name, known, n=1)
    return RewardError(
        f"there is no reward type {name!r}",
        where=where,
        expected=f"one of {', '.join(TYPES)} (each also with the prefix {BOXED}), "
        "or a function as `module:function` or `file.py:function`",
        found=repr(name),
        fix=f"did you mean {close[0]!r}?" if close else "check the name",
    )


def type_params(name: str, config: RewardConfig) -> dict[str, Any]:
    """The settings that the configuration gives a type.

    Raises:
        RewardError: they are not a mapping.
    """
    kind = base_type(name)
    nested = config.params.get(kind, config.params.get(name))
    if isinstance(nested, dict):
        return nested
    is_flat = not any(one in config.params for one in TYPES)
    is_configured = config.type is not None and base_type(config.type) == kind
    return config.params if is_flat and is_configured else {}


P = TypeVar("P", bound=Params)


def parsed_params(kind: type[P], name: str, config: RewardConfig) -> P:
    """The settings of a type, validated.

    Raises:
        RewardError: an unknown setting or a wrong value.
    """
    given = type_params(name, config)
    try:
        return kind(**given)
    except (ValidationError, TypeError) as error:
        known = list(kind.model_fields)
        raise RewardError(
            f"the settings of the reward {name!r} are wrong: {_first_problem(error)}",
            where="reward.params",
            expected=f"settings among {', '.join(known) or '(none)'}",
            found=repr(given),
            fix=_nearest_setting(given, known) or "see docs/rewards.md for what each one means",
        ) from error


def _first_problem(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        return f"there is no {'.'.join(map(str, first['loc']))}"
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _nearest_setting(given: dict[str, Any], known: list[str]) -> str | None:
    for name in given:
        close = difflib.get_close_matches(str(name), known, n=1)
        if name not in known and close:
            return f"did you mean {close[0]!r}?"
    return None


class GraderTable:
    """Loads each grader once, when it is first asked for."""

    def __init__(self, config: RewardConfig, *, base_dir: Path, seed: int) -> None:
        self._config = config
        self._base_dir = base_dir
        self._seed = seed
        self._loaded: dict[tuple[str, bool], Grader | CustomReward] = {}

    def get(self, name: str, *, per_group: bool = False) -> Grader | CustomReward:
        """The grader of a name.

        Raises:
            RollmillError: there is none, or it cannot be loaded.
        """
        key = (name, per_group)
        if key not in self._loaded:
            self._loaded[key] = self._load(name, per_group)
        return self._loaded[key]

    def _load(self, name: str, per_group: bool) -> Grader | CustomReward:
        if is_function_path(name):
            return CustomReward(name, self._base_dir, per_group=per_group)
        if not is_type(name):
            raise unknown_type(name)
        grader = builtin_grader(base_type(name), self._config, self._seed)
        return Boxed(grader) if name.startswith(BOXED) else grader


class Boxed:
    """`boxed_X`: the content of the last box is the answer, scored as X scores answers."""

    def __init__(self, inner: Grader) -> None:
        self._inner = inner

    def extract(self, item: RewardInput) -> str | None:
        """The content of the last `\\boxed{}`; an empty one is no answer."""
        from rollmill.rewards.mathematics.extract import last_boxed

        content = last_boxed(item.response)
        return content if content is not None and content.strip() else None

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """As the inner type."""
        return self._inner.score(answer, item)


def builtin_grader(kind: str, config: RewardConfig, seed: int) -> Grader:
    """The grader of a built-in type; its libraries are imported only here."""
    if kind == "math":
        from rollmill.rewards.graders.math import MathGrader, MathParams

        return MathGrader(parsed_params(MathParams, kind, config))
    if kind == "deepscaler":
        from rollmill.rewards.graders.deepscaler import DeepscalerGrader, DeepscalerParams

        return DeepscalerGrader(parsed_params(DeepscalerParams, kind, config))
    if kind == "dapo":
        from rollmill.rewards.graders.dapo import DapoGrader, DapoParams

        return DapoGrader(parsed_params(DapoParams, kind, config))
    if kind == "f1":
        from rollmill.rewards.graders.f1 import F1Grader, F1Params

        return F1Grader(parsed_params(F1Params, kind, config))
    if kind == "gpqa":
        from rollmill.rewards.graders.gpqa import GpqaGrader, GpqaParams

        return GpqaGrader(parsed_params(GpqaParams, kind, config))
    if kind == "ifbench":
        from rollmill.rewards.graders.ifbench import IfbenchGrader, IfbenchParams

        return IfbenchGrader(parsed_params(IfbenchParams, kind, config))
    if kind == "code":
        from rollmill.rewards.graders.code import CodeGrader, CodeParams

        return CodeGrader(parsed_params(CodeParams, kind, config), config.timeout_s)
    if kind == "random":
        from rollmill.rewards.graders.random import RandomGrader, RandomParams

        return RandomGrader(parsed_params(RandomParams, kind, config), seed)
    raise RewardError(f"the reward type {kind!r} is not graded in a worker process")
