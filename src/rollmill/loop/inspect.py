"""`rollmill inspect`: the books of a run, and the story of one group."""

from __future__ import annotations

import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_history, read_report
from rollmill.errors import LedgerError
from rollmill.loop.run_dir import RunDir
from rollmill.sample import Sample
from rollmill.telemetry.samples import read_samples

MEANINGS = {
    State.ISSUED: "taken from the data, nothing generated",
    State.IN_FLIGHT: "being generated or judged",
    State.WAITING: "unfinished, its answers so far kept for a later step",
    State.READY: "finished, not yet trained on",
    State.CONSUMED: "trained on",
    State.REJECTED: "turned down by a filter",
    State.FAILED: "could not be completed",
}


def show_run(run: Path) -> None:
    """Print how many groups are in which state, and why those that were not trained on were not."""
    console = Console()
    report = read_report(RunDir(run).ledger)
    table = Table(title=f"prompts of {run}", show_edge=False)
    table.add_column("state")
    table.add_column("groups", justify="right")
    table.add_column("meaning")
    for state, count in report.balance.items():
        table.add_row(state.value, str(count), MEANINGS[state])
    table.add_section()
    table.add_row("issued, all", str(report.num_issued), "the sum of the above")
    console.print(table)
    for state, reason, count in report.reasons:
        console.print(Text(f"{state.value}: {count} × {reason or 'no reason'}"))
    if report.num_consumed_by_step:
        last = max(report.num_consumed_by_step)
        console.print(f"trained steps: {len(report.num_consumed_by_step)} (last: {last})")


def show_group(run: Path, group_index: int) -> None:
    """Print everything that happened to one group, and its samples when it was trained on.

    Raises:
        LedgerError: no such group was issued.
    """
    console = Console()
    events = read_history(RunDir(run).ledger, group_index)
    if not events:
        raise LedgerError(
            "no such group was issued",
            where=str(run),
            found=str(group_index),
            fix="give a number below the count issued: `rollmill inspect RUN` prints it",
        )
    for event in events:
        when = datetime.datetime.fromtimestamp(event.time).isoformat(sep=" ", timespec="seconds")
        step = "" if event.step is None else f"step {event.step}"
        tokens = f"{event.num_tokens} tokens" if event.num_tokens else ""
        undone = "(undone by a resume)" if event.is_undone else ""
        parts = [when, f"{event.state.value:<10}", step, tokens, event.reason or "", undone]
        console.print(Text("  ".join(part for part in parts if part)))
    consumed = [e.step for e in events if e.state is State.CONSUMED and not e.is_undone]
    if consumed and consumed[0] is not None:
        path = RunDir(run).samples / f"step_{consumed[0]:06d}.parquet"
        if path.exists():
            for sample in read_samples(path):
                if sample.group_index == group_index:
                    _show_sample(console, sample)


def _show_sample(console: Console, sample: Sample) -> None:
    versions = sorted({s.weight_version for s in sample.segments if s.weight_version is not None})
    console.print(
        Text(
            f"\nattempt {sample.attempt}  {sample.status.value}  reward {sample.reward}  "
            f"{sample.response_length} tokens  weight versions {versions}",
            style="bold",
        )
    )
    console.print(Text(sample.response))
