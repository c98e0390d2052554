"""`grade` and `check rewards`: answers from files, and data sets proved before a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollmill.config.reward import RewardConfig
from rollmill.errors import DataError
from rollmill.rewards.check import check_rewards, corrupted
from rollmill.rewards.commands import check_rewards as check_command
from rollmill.rewards.commands import grade as grade_command
from rollmill.rewards.grade_file import grade_jsonl


@dataclass
class Row:
    label: Any
    prompt: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    row_id: str = "rows:1"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def graded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_row_gets_one_line_in_order(tmp_path: Path) -> None:
    huge = "1" + "0" * 5000
    source = write(
        tmp_path / "in.jsonl",
        {"type": "math", "response": r"\boxed{5}", "label": "5"},
        {"type": "f1", "response": "Paris", "label": "Paris France"},
        {"response": "nothing of the kind was found in all of this long text", "label": 3},
        "this is not JSON",
        {"type": "gpqa", "response": "The answer is B.", "label": 1, "choices": ["x", "y"]},
        {"type": "maths", "response": "x", "label": "x"},
        {"type": "math", "label": "x"},
        f'{{"type": "math", "response": "\\\\boxed{{{huge}}}", "label": {huge}}}',
    )
    out = tmp_path / "out.jsonl"

    summary = grade_jsonl(source, out, RewardConfig(type="math"))

    rows = graded(out)
    assert [row["outcome"] for row in rows] == [
        "value", "value", "invalid", "error", "value", "error", "error", "value",
    ]  # fmt: skip
    assert [row["reward"] for row in rows if row["outcome"] == "value"] == [
        1.0, pytest.approx(2 / 3), 1.0, 1.0,
    ]  # fmt: skip
    assert set(rows[0]) == {"outcome", "reward", "extracted", "detail", "seconds"}
    assert rows[0]["extracted"] == "5"
    assert "line 4" in rows[3]["detail"]
    assert summary.num_rows == 8
    assert summary.outcomes == {"value": 4, "error": 3, "invalid": 1}


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl"):
        grade_jsonl(tmp_path / "no.jsonl", None, RewardConfig())


def test_the_grade_command_writes_lines_to_standard_output(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"response": "Answer: 5", "label": 5})
    app = typer.Typer()
    app.command()(grade_command)

    result = CliRunner().invoke(app, [str(source), "--type", "dapo"])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[0])["reward"] == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"type": "math"}, [Row("5"), Row(7), Row(r"\frac{1}{2}"), Row(["3", "4"]), Row("(1,2)")]),
        ({"type": "dapo"}, [Row("34"), Row(5)]),
        ({"type": "f1"}, [Row("Paris"), Row(["London", "the City"])]),
        ({"type": "deepscaler"}, [Row(r"2\sqrt{3}")]),
        ({"type": "boxed_math"}, [Row("x+1")]),
        ({"type": "gpqa"}, [Row("B", metadata={"choices": ["x", "y"]}), Row(0)]),
        ({"weights": {"math": 1.0}}, [Row("5")]),
    ],
)
def test_gold_answers_score_full_and_corrupted_ones_do_not(
    tmp_path: Path, config: dict[str, Any], rows: list[Row]
) -> None:
    report = check_rewards(rows, RewardConfig(**config), base_dir=tmp_path)

    assert report.is_fine, report
    assert report.num_gold >= len(rows)
    assert report.num_corrupted >= len(rows) or "f1" in str(config)


def test_labels_that_cannot_be_right_are_listed(tmp_path: Path) -> None:
    rows = [Row("5"), Row(None, row_id="rows:2"), Row("", row_id="rows:3")]

    report = check_rewards(rows, RewardConfig(type="math"), base_dir=tmp_path)

    assert [finding.row_id for finding in report.gold_failures] == ["rows:2", "rows:3"]


def test_a_reward_that_gives_everything_full_marks_is_caught(tmp_path: Path) -> None:
    (tmp_path / "lax.py").write_text("def reward(sample):\n    return 1.0\n")
    rows = [Row("5", metadata={"reward_type": "f1"}), Row("6")]

    report = check_rewards(rows, RewardConfig(function="lax.py:reward"), base_dir=tmp_path)

    assert {finding.label for finding in report.corrupted_passes} == {"6"}


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    code = Row({"inputs": ["1"], "outputs": ["1"]}, metadata={"reward_type": "code"})
    solved = Row(code.label, metadata={"reward_type": "code", "solution": "print(input())"})

    report = check_rewards([code, solved], RewardConfig(type="math"), base_dir=tmp_path)

    assert report.is_fine
    assert report.num_gold == 1
    assert "metadata.solution" in next(iter(report.unchecked))


def test_the_check_command_shows_findings_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = check_command([Row("5"), Row(None)], RewardConfig(type="math"), base_dir=tmp_path)

    assert code == 1
    shown = capsys.readouterr().out
    assert "gold answers with full marks: 1 of 2" in shown


@pytest.mark.parametrize("label", ["5", "Paris", r"\frac{1}{2}", "(1, 2)", "9" * 5000])
def test_corrupted_answers_differ_from_the_label(label: str) -> None:
    assert label not in corrupted(label)


def test_a_label_that_is_an_object_is_graded_as_its_json_by_a_custom_reward(tmp_path) -> None:
    from rollmill.config import RewardConfig
    from rollmill.data import PromptRow
    from rollmill.rewards.check import check_rewards

    (tmp_path / "r.py").write_text(
        "import json\ndef reward(sample):\n"
        "    return float(sample.response == json.dumps(sample.label))\n"
    )
    rows = [PromptRow("q", [1, 2], {"age": 34, "name": "Vera"}, row_id="a:1")]
    report = check_rewards(rows, RewardConfig(function="r.py:reward"), base_dir=tmp_path)
    assert report.is_fine
    assert (report.num_gold, report.num_corrupted) == (1, 2)
