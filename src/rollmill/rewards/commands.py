"""The reward commands of the command line: `grade` and `check rewards`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rollmill.config.reward import RewardConfig
from rollmill.rewards.check import CheckReport, Finding, LabelledRow
from rollmill.rewards.check import check_rewards as run_check
from rollmill.rewards.grade_file import grade_jsonl

MAX_SHOWN = 20


def grade(
    file: Annotated[Path, typer.Argument(help="JSONL rows {type, response, label, …metadata}.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write; standard output if left out."),
    ] = None,
    reward_type: Annotated[
        str | None, typer.Option("--type", "-t", help="Reward of rows without a type.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Your reward for rows without a type: file.py:function.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 1,
    timeout: Annotated[float, typer.Option(help="Time limit of one answer in seconds.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of the random reward.")] = 0,
) -> None:
    """Grade FILE; one JSON line {outcome, reward, extracted, detail, seconds} per answer."""
    config = RewardConfig(
        type=reward_type, function=function, num_workers=workers, timeout_s=timeout
    )
    summary = grade_jsonl(file, out, config, base_dir=Path.cwd(), seed=seed)
    Console(stderr=True).print(str(summary), highlight=False)
    if summary.num_rows and summary.outcomes["error"] == summary.num_rows:
        raise typer.Exit(1)  # nothing was graded: the file or the reward is wrong as a whole


def check_rewards(
    rows: Iterable[LabelledRow], config: RewardConfig, *, base_dir: Path, seed: int = 0
) -> int:
    """Grade the gold labels of `rows` and corrupted answers, and print what is wrong.

    The command line loads the rows (it may import the data room, this one may not). The result is
    the exit code: 0 when all is fine, 1 when a gold answer failed or a corrupted one passed.
    """
    report = run_check(rows, config, base_dir=base_dir, seed=seed)
    console = Console()
    show_report(report, console)
    return 0 if report.is_fine else 1


def show_report(report: CheckReport, console: Console) -> None:
    """Print a report: counts, then the findings."""
    num_right = report.num_gold - len(report.gold_failures)
    num_refused = report.num_corrupted - len(report.corrupted_passes)
    console.print(f"gold answers with full marks: {num_right} of {report.num_gold}")
    console.print(f"corrupted answers without: {num_refused} of {report.num_corrupted}")
    for reason, count in report.unchecked.items():
        console.print(f"not checked: {count} rows ({reason})", markup=False)
    _show(console, "gold answers that did not get full marks", report.gold_failures)
    _show(console, "corrupted answers that got full marks", report.corrupted_passes)


def _show(console: Console, title: str, findings: list[Finding]) -> None:
    if not findings:
        return
    table = Table(title=f"{title} ({len(findings)})", title_justify="left")
    for name in ("row", "label", "answer", "outcome", "detail"):
        table.add_column(name, overflow="fold")
    for finding in findings[:MAX_SHOWN]:
        outcome = finding.outcome
        shown = outcome.kind.value if outcome.reward is None else str(outcome.reward)
        cells = (finding.row_id, str(finding.label), finding.response, shown, outcome.detail or "")
        table.add_row(*(cell[:200].replace("[", r"\[") for cell in cells))
    console.print(table)
