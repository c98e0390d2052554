"""Procedural tasks of the reasoning-gym library as a data source, and their own graders.

A row remembers the task, its parameters (seed included) and the entry's number. Grading builds
the same entry again, so that nothing about it has to survive a trip through JSON.

As a reward: `reward.function: rollmill.data.reasoning_gym:reward`.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from rollmill.data.readers import BadRowError, RawRow
from rollmill.errors import DataError

METADATA_KEY = "reasoning_gym"
"""Key of a sample's metadata with `{"task", "params", "index"}`."""

TASK_CONFIG = MappingProxyType(
    {
        "prompt_key": "question",
        "label_key": "answer",
        "metadata_key": "metadata",
        "tools_key": None,
        "images_key": None,
    }
)
"""Where a task's rows keep their fields, whatever the configuration says about files."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINK_END = "</think>"


class Answered(Protocol):
    """What the reward looks at."""

    response: str
    metadata: dict[str, Any]


def task_rows(name: str, params: Mapping[str, Any], seed: int) -> Iterator[RawRow]:
    """The entries of the task `name` as rows.

    Args:
        name: a reasoning-gym task.
        params: parameters of the task; `size` is the number of entries.
        seed: taken when `params` has no seed.

    Raises:
        DataError: the library is missing, or does not know the task or a parameter.
    """
    fixed = {"seed": seed, **params}
    task = _create(name, _as_key(fixed))
    return (
        RawRow(f"reasoning_gym.{name}:{index}", _entry_loader(task, name, fixed, index))
        for index in range(len(task))
    )


def reward(sample: Answered) -> float:
    """The task's own score of a sample's answer, 0 to 1."""
    return score(sample.metadata, extract_answer(sample.response))


def score(metadata: Mapping[str, Any], answer: str | None) -> float:
    """The task's own score of `answer` (0 to 1) for the entry that `metadata` names.

    Raises:
        DataError: the metadata does not come from a reasoning-gym data set.
    """
    origin = metadata.get(METADATA_KEY)
    if not isinstance(origin, Mapping) or not {"task", "params", "index"} <= origin.keys():
        raise DataError(
            "a sample that does not come from a reasoning-gym data set",
            where=f"metadata.{METADATA_KEY}",
            expected="task, params and index",
            found=repr(origin),
            fix="use this reward only with data.reasoning_gym",
        )
    task = _create(origin["task"], _as_key(origin["params"]))
    return float(task.score_answer(answer, task[origin["index"]]))


def extract_answer(response: str) -> str | None:
    """The answer in a response: the last `<answer>…</answer>`, else all after `</think>`.

    None when nothing is left.
    """
    tagged = _ANSWER_TAG.findall(response)
    text = tagged[-1] if tagged else response.rpartition(_THINK_END)[2]
    return text.strip() or None


def _entry_loader(task: Any, name: str, params: Mapping[str, Any], index: int) -> Any:
    def load() -> dict[str, Any]:
        entry = task[index]
        if entry.get("answer") is not None and not isinstance(entry["answer"], str):
            raise BadRowError(f"the answer is not text: {entry['answer']!r}")
        origin = {"task": name, "params": dict(params), "index": index}
        return {
            "question": entry["question"],
            "answer": entry.get("answer"),
            "metadata": {METADATA_KEY: origin},
        }

    return load


def _as_key(params: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(params), sort_keys=True)
    except TypeError as error:
        raise DataError(
            "parameters of a reasoning-gym task that are not JSON values",
            where="data.reasoning_gym_params",
            found=str(error),
            fix="write numbers, texts, lists and mappings only",
        ) from error


@lru_cache(maxsize=32)
def _create(name: str, params: str) -> Any:
    """The task's data set. Cached because graders ask for the same few again and again."""
    _stand_in_for_pycosat()
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            "reasoning-gym is not installed",
            where="data.reasoning_gym",
            found=str(error),
            fix="pip install 'rollmill[quickstart]'",
        ) from error
    if name not in DATASETS:
        raise _unknown_task(name, list(DATASETS))
    try:
        return reasoning_gym.create_dataset(name, **json.loads(params))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"parameters that the reasoning-gym task {name} does not take",
            where="data.reasoning_gym_params",
            expected=f"fields of {DATASETS[name][1].__name__}",
            found=str(error) or params,
            fix="see the task's page in reasoning-gym's documentation",
        ) from error


def _stand_in_for_pycosat() -> None:
    """Let reasoning-gym be imported without pycosat, which only its logic puzzles use.

    pycosat comes as C source alone; without this a machine with no compiler could use no task.
    """
    if "pycosat" in sys.modules or importlib.util.find_spec("pycosat") is not None:
        return

    def itersolve(*_: Any, **__: Any) -> Any:
        raise DataError(
            "this reasoning-gym task needs the package pycosat",
            where="data.reasoning_gym",
            fix="pip install pycosat (it is built from C source, so a compiler is needed)",
        )

    stand_in = types.ModuleType("pycosat")
    stand_in.itersolve = itersolve  # type: ignore[attr-defined]
    sys.modules["pycosat"] = stand_in


def _unknown_task(name: str, known: list[str]) -> DataError:
    close = difflib.get_close_matches(name, known, n=3)
    return DataError(
        "no reasoning-gym task of that name",
        where="data.reasoning_gym",
        expected=f"one of its {len(known)} tasks",
        found=name,
        fix=f"did you mean {' or '.join(close)}?" if close else "for example chain_sum",
    )
