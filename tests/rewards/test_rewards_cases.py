"""The public table of graded cases: every row of `cases/*.jsonl` is graded as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill.config.reward import RewardConfig
from rollmill.rewards.grade_file import read_row
from rollmill.rewards.graders.base import Grader
from rollmill.rewards.judging import judge_with
from rollmill.rewards.outcome import Outcome
from rollmill.rewards.registry import GraderTable

CASES = Path(__file__).parent / "cases"


def load_cases() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name}:{number}", json.loads(line))
        for path in sorted(CASES.glob("*.jsonl"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


ALL_CASES = load_cases()


@pytest.fixture(scope="module")
def table() -> GraderTable:
    return GraderTable(RewardConfig(), base_dir=CASES, seed=0)


def grade(table: GraderTable, row: dict[str, Any]) -> Outcome:
    row = {key: value for key, value in row.items() if key not in ("want", "kind")}
    item, reward = read_row(json.dumps(row))
    assert reward is not None
    grader: Any = table.get(reward)
    checked: Grader = grader
    return judge_with(checked, item)


def found(outcome: Outcome) -> Any:
    return outcome.kind.value if outcome.reward is None else outcome.reward


@pytest.mark.parametrize(("where", "row"), ALL_CASES, ids=[where for where, _ in ALL_CASES])
def test_case_is_graded_as_the_table_says(
    where: str, row: dict[str, Any], table: GraderTable
) -> None:
    outcome = grade(table, row)

    assert found(outcome) == pytest.approx(row["want"]), (where, row, outcome)


LONG_ANSWERS = {
    "brackets": "(" * 3000 + "5" + ")" * 3000,
    "signs": "-" * 5001 + "5",
    "fractions": r"\frac{1}{" * 500 + "2" + "}" * 500,
    "list": "1," * 3000 + "1",
    "sum": "1+" * 3000 + "1",
    "scaled matrices": r"2\begin{pmatrix}" * 500,
    "outward brackets": "]1,2[" * 1000,
    "alternatives": " or ".join(f"x<{k}" for k in range(1000)),
    "unclosed text": r"\text{a" * 1000,
    "qualifiers": r", k \in \mathbb{Z}" * 500,
    "about": r"\approx" * 3000 + "5",
    "words": "and a half " * 1000,
}


@pytest.mark.parametrize("kind", ["math", "dapo", "deepscaler"])
@pytest.mark.parametrize("name", LONG_ANSWERS)
def test_a_long_hostile_answer_is_wrong_and_no_error(
    name: str, kind: str, table: GraderTable
) -> None:
    text = rf"Answer: \boxed{{{LONG_ANSWERS[name]}}}"
    outcome = grade(table, {"type": kind, "response": text[:-1] + "}", "label": "6"})

    assert found(outcome) in (0.0, {"score": -1.0, "acc": 0.0}, "invalid")


def test_the_table_has_at_least_300_cases_of_every_type() -> None:
    types = {str(row["type"]).removeprefix("boxed_") for _, row in ALL_CASES}

    assert len(ALL_CASES) >= 300
    assert types >= {"math", "deepscaler", "dapo", "f1", "gpqa", "ifbench", "code"}


def test_the_math_cases_do_not_depend_on_which_side_is_the_label(table: GraderTable) -> None:
    """Equality is symmetric: a box and its label can change places."""
    for where, row in ALL_CASES:
        boxed = str(row["response"])
        is_simple = row["type"] == "math" and boxed.startswith("\\boxed{") and boxed.endswith("}")
        if is_simple and row["want"] in (0, 1) and isinstance(row["label"], str):
            swapped = {**row, "response": f"\\boxed{{{row['label']}}}", "label": boxed[7:-1]}
            if "\\boxed" in row["label"] or "####" in row["label"] or "\\boxed" in boxed[7:]:
                continue
            assert found(grade(table, swapped)) == row["want"], (where, row)
