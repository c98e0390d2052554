"""Proving a reward before a run: gold answers must score full marks, corrupted ones must not.

A data set whose own labels are graded wrong teaches a model the wrong thing; this finds the rows.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollmill.config.reward import RewardConfig
from rollmill.rewards.graders.base import GradingError, label_texts
from rollmill.rewards.graders.gpqa import options_of, right_letter
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.judge import Judge
from rollmill.rewards.outcome import PRIMARY_PARTS, Outcome, OutcomeKind
from rollmill.rewards.registry import BOXED, base_type, is_type
from rollmill.sample import Reward

_WINDOW = 1024
_UNCHECKED = {
    "random": "its rewards do not depend on answers",
    "ifbench": "its rows have instructions, not answers",
}


class LabelledRow(Protocol):
    """What is needed of a data row."""

    @property
    def prompt(self) -> str | list[dict[str, Any]]: ...  # noqa: D102
    @property
    def label(self) -> Any: ...  # noqa: D102
    @property
    def metadata(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def row_id(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Finding:
    """A row that was graded otherwise than it must be."""

    row_id: str
    label: Any
    response: str
    outcome: Outcome


@dataclass(slots=True)
class CheckReport:
    """What the check found.

    Attributes:
        num_gold: gold answers graded.
        num_corrupted: corrupted answers graded.
        gold_failures: gold answers without full marks.
        corrupted_passes: corrupted answers with full marks.
        unchecked: reasons why rows could not be checked, with their number.
    """

    num_gold: int = 0
    num_corrupted: int = 0
    gold_failures: list[Finding] = field(default_factory=list)
    corrupted_passes: list[Finding] = field(default_factory=list)
    unchecked: dict[str, int] = field(default_factory=dict)

    @property
    def is_fine(self) -> bool:
        """Whether every gold answer and no corrupted one got full marks."""
        return not self.gold_failures and not self.corrupted_passes


@dataclass(frozen=True, slots=True)
class _Probe:
    row: LabelledRow
    response: str
    is_gold: bool


def check_rewards(
    rows: Iterable[LabelledRow],
    config: RewardConfig,
    *,
    base_dir: Path,
    seed: int = 0,
    full_marks: float = 1.0,
) -> CheckReport:
    """Grade each row's label as its answer, and some wrong answers.

    Args:
        rows: the data rows (prompt, label, metadata, row_id).
        config: the reward section.
        base_dir: folder of the configuration file.
        seed: the run's seed.
        full_marks: reward of a right answer.

    Raises:
        RollmillError: the reward cannot be loaded.
    """
    return asyncio.run(_check(rows, config, base_dir, seed, full_marks))


async def _check(
    rows: Iterable[LabelledRow], config: RewardConfig, base_dir: Path, seed: int, full_marks: float
) -> CheckReport:
    report = CheckReport()
    probes: list[_Probe] = []
    async with Judge(config, seed=seed, base_dir=base_dir) as judge:
        for row in rows:
            probes += _probes(row, config, report)
            if len(probes) >= _WINDOW:
                await _grade(judge, probes, config, report, full_marks)
                probes = []
        await _grade(judge, probes, config, report, full_marks)
    return report


async def _grade(
    judge: Judge,
    probes: Sequence[_Probe],
    config: RewardConfig,
    report: CheckReport,
    full_marks: float,
) -> None:
    inputs = [RewardInput(p.row.prompt, p.response, p.row.label, p.row.metadata) for p in probes]
    outcomes = await asyncio.gather(*(judge.judge_input(item) for item in inputs))
    for probe, outcome in zip(probes, outcomes, strict=True):
        is_full = (
            outcome.kind is OutcomeKind.VALUE
            and _scalar(outcome.reward, config.reward_key) >= full_marks
        )
        finding = Finding(probe.row.row_id, probe.row.label, probe.response, outcome)
        if probe.is_gold:
            report.num_gold += 1
            report.gold_failures += [] if is_full else [finding]
        else:
            report.num_corrupted += 1
            report.corrupted_passes += [finding] if is_full else []


def _scalar(reward: Reward | None, key: str | None) -> float:
    if isinstance(reward, dict):
        names = [name for name in (key, *PRIMARY_PARTS) if name in reward]
        return reward[names[0]] if names and names[0] is not None else 0.0
    return 0.0 if reward is None else reward


def _probes(row: LabelledRow, config: RewardConfig, report: CheckReport) -> list[_Probe]:
    name = row.metadata.get("reward_type") or config.type or config.function
    name = name or next(iter(config.weights), "")
    kind = base_type(str(name))
    reason = _UNCHECKED.get(kind)
    if kind == "code" and "solution" not in row.metadata:
        reason = "its rows need metadata.solution, a program that passes the tests"
    if reason is not None:
        report.unchecked[f"{name}: {reason}"] = report.unchecked.get(f"{name}: {reason}", 0) + 1
        return []
    gold, wrong = _answers(kind, row)
    is_boxed = str(name).startswith(BOXED)
    shape = _boxed if is_boxed else _SHAPES.get(kind, str)
    return [
        *(_Probe(row, shape(answer), True) for answer in gold),
        *(_Probe(row, shape(answer), False) for answer in wrong),
    ]


def _boxed(answer: str) -> str:
    return rf"The answer is \boxed{{{answer}}}."


def _fenced(answer: str) -> str:
    return f"```python\n{answer}\n```"


_SHAPES = {
    "math": _boxed,
    "deepscaler": _boxed,
    "dapo": lambda answer: f"Answer: {answer}",
    "gpqa": lambda answer: f"The answer is ({answer}).",
    "code": _fenced,
}


def _answers(kind: str, row: LabelledRow) -> tuple[list[str], list[str]]:
    """Right and wrong answers to a row. A label that is no answer is graded as it is."""
    if kind == "code":
        return [str(row.metadata["solution"])], ["raise SystemExit(1)"]
    if kind == "gpqa":
        item = RewardInput(row.prompt, "", row.label, row.metadata)
        try:
            letter = right_letter(item, options_of(item))
        except GradingError:
            letter = None
        if letter is not None:
            letters = options_of(item).letters
            return [letter], [letters[(letters.index(letter) + 1) % len(letters)]]
    if not is_type(kind) and isinstance(row.label, dict):
        gold = json.dumps(row.label, ensure_ascii=False)
        return [gold], corrupted(gold)
    try:
        labels = label_texts(row.label)
    except GradingError:
        return [""], []
    return labels, [wrong for wrong in corrupted(labels[0]) if wrong not in labels]


def corrupted(label: str) -> list[str]:
    """Wrong answers that are close to a label: the last number changed, and a word that differs."""
    numbers = list(re.finditer(r"\d+", label))
    wrong = ["no such answer qzx"]
    if numbers:
        last = numbers[-1]
        changed = str(int(last.group()) + 1) if len(last.group()) < 4000 else last.group() + "1"
        wrong.append(label[: last.start()] + changed + label[last.end() :])
    return wrong
