"""Grading answers from a file: JSONL in, JSONL out, in order, in bounded memory.

A row is `{type, response, label, …metadata}`; `prompt` and a nested `metadata` are known too. The
output has one line per row: `{outcome, reward, extracted, detail, seconds}`; `reward` is null
unless the outcome is `value`. A line that cannot be read is an `error` line, not the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from rollmill.config.reward import RewardConfig
from rollmill.errors import DataError
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.judge import Judge
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rewards.registry import is_type, unknown_type

WINDOW = 2048
"""Answers held at a time."""
_OWN_FIELDS = frozenset(("type", "response", "label", "metadata", "prompt"))


@dataclass(slots=True)
class GradeSummary:
    """What became of a file.

    Attributes:
        num_rows: lines graded.
        outcomes: how many ended how.
        reward_sum: sum of the rewards that are single numbers.
        num_rewards: how many those are.
    """

    num_rows: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reward_sum: float = 0.0
    num_rewards: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.num_rows += 1
        self.outcomes[outcome.kind.value] += 1
        if isinstance(outcome.reward, float):
            self.reward_sum += outcome.reward
            self.num_rewards += 1

    def __str__(self) -> str:
        if self.num_rewards:
            mean = f"mean reward {self.reward_sum / self.num_rewards:.4f} of {self.num_rewards}"
        else:
            mean = "no reward"
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        return f"{self.num_rows} answers: {counts or 'none'}; {mean}"


def grade_jsonl(
    in_path: Path,
    out_path: Path | None,
    config: RewardConfig,
    *,
    base_dir: Path | None = None,
    seed: int = 0,
) -> GradeSummary:
    """Grade the rows of `in_path` into `out_path` (None: standard output).

    Raises:
        DataError: the file cannot be read.
        RollmillError: the configured reward cannot be loaded.
    """
    if not in_path.is_file():
        raise DataError(
            "the file to grade does not exist",
            where=str(in_path),
            fix="check the path; rows are JSON lines with type, response and label",
        )
    folder = in_path.parent if base_dir is None else base_dir
    return asyncio.run(_grade(in_path, out_path, config, folder, seed))


async def _grade(
    in_path: Path, out_path: Path | None, config: RewardConfig, base_dir: Path, seed: int
) -> GradeSummary:
    summary = GradeSummary()
    pending: deque[asyncio.Task[Outcome]] = deque()
    with ExitStack() as stack:
        source = stack.enter_context(in_path.open(encoding="utf-8", errors="replace"))
        sink: BinaryIO = (
            sys.stdout.buffer if out_path is None else stack.enter_context(out_path.open("wb"))
        )
        async with Judge(config, seed=seed, base_dir=base_dir) as judge:
            for number, line in _numbered(source):
                pending.append(asyncio.create_task(_grade_line(judge, number, line)))
                if len(pending) >= WINDOW:
                    _write(sink, await pending.popleft(), summary)
            while pending:
                _write(sink, await pending.popleft(), summary)
        sink.flush()
    return summary


def _numbered(source: TextIO) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(source, 1) if line.strip())


async def _grade_line(judge: Judge, number: int, line: str) -> Outcome:
    try:
        item, reward = read_row(line, number)
    except ValueError as error:
        return Outcome.error(f"line {number}: {error}")
    return await judge.judge_input(item, reward)


def read_row(line: str, number: int = 0) -> tuple[RewardInput, str | None]:
    """The answer on a line, and the type that the row asks for.

    Raises:
        ValueError: the line is not such a row.
    """
    row = json.loads(line, parse_int=_exact_integer)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    if not isinstance(row.get("response"), str):
        raise ValueError("expected `response` with the answer's text")
    nested = row.get("metadata") or {}
    if not isinstance(nested, dict):
        raise ValueError("expected `metadata` to be a JSON object")
    reward = row.get("type")
    if reward is not None and not (isinstance(reward, str) and is_type(reward)):
        raise ValueError(unknown_type(str(reward)).what)
    metadata = {**{k: v for k, v in row.items() if k not in _OWN_FIELDS}, **nested}
    item = RewardInput(
        prompt=row.get("prompt") or "",
        response=row["response"],
        label=row.get("label"),
        metadata=metadata,
        index=number,
    )
    return item, reward


def _exact_integer(digits: str) -> int | str:
    """Integers of any size; very long ones as their digits, which grade the same."""
    return int(digits) if len(digits) <= 4000 else digits


def _write(sink: BinaryIO, outcome: Outcome, summary: GradeSummary) -> None:
    summary.add(outcome)
    sink.write(
        json.dumps(as_record(outcome), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    )


def as_record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as the fields of an output line."""
    return {
        "outcome": outcome.kind.value,
        "reward": outcome.reward if outcome.kind is OutcomeKind.VALUE else None,
        "extracted": outcome.extracted,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 6),
    }
