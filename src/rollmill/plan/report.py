"""A plan for people: what was assumed, how long a step takes by schedule, and the memory."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmill.plan.assumptions import Assumptions, as_mapping
from rollmill.plan.fit import Measured
from rollmill.plan.schedule import Schedule, StepTimes, mean_of
from rollmill.plan.simulate import simulate

GIB = 1 << 30
COLUMNS = (
    ("step", "s"),
    ("rollout", "s"),
    ("train", "s"),
    ("trainer", "idle %"),
    ("engines", "idle %"),
    ("trained", "tok/s"),
    ("wasted", "%"),
    ("staleness", "mean/max"),
)


def show_assumptions(
    console: Console, assumptions: Assumptions, measured: Measured | None, *, num_stated: int
) -> None:
    """Print where the figures come from and what they are."""
    if measured is None:
        console.print(Text("assumed:", style="bold"))
    else:
        first, last = measured.steps[0], measured.steps[-1]
        off = measured.simulated_s / measured.step_s - 1
        console.print(Text(f"measured in steps {first} to {last}:", style="bold"))
        console.print(
            Text(
                f"  a step took {measured.step_s:.3g} s; with these figures the simulation takes "
                f"{measured.simulated_s:.3g} s ({off:+.1%})"
            )
        )
        if num_stated:
            console.print(Text(f"  {num_stated} of them replaced by what was stated"))
    figures = [f"{name} {value:.4g}" for name, value in as_mapping(assumptions).items()]
    for start in range(0, len(figures), 4):
        console.print(Text("  " + ", ".join(figures[start : start + 4])))


def show_schedules(
    console: Console, schedules: Mapping[str, Schedule], assumptions: Assumptions, num_steps: int
) -> dict[str, StepTimes]:
    """Print the mean step of each schedule, the first of them the configuration's own."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for title, unit in COLUMNS:
        table.add_column(f"{title}\n{unit}", justify="right", no_wrap=True)
    found: dict[str, StepTimes] = {}
    for name, schedule in schedules.items():
        mean = mean_of(simulate(schedule, assumptions, num_steps=num_steps))
        style = "" if found else "bold"
        table.add_row(Text(name), *_row(mean), style=style)
        found[name] = mean
    console.print(table)
    console.print(
        Text(
            "The first line is the configuration's own. rollout: what the trainer waits for; "
            "wasted: of the tokens written."
        )
    )
    return found


def show_memory(console: Console, uses: Mapping[str, int], free: int) -> None:
    """Print bytes by use against what is free."""
    needed = sum(uses.values())
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in uses.items())
    verdict = "fits" if needed <= free else "does NOT fit"
    console.print(
        Text(
            f"memory on this machine: {needed / GIB:.1f} GiB of {free / GIB:.1f} GiB free: "
            f"{verdict} ({parts})"
        )
    )


def _row(mean: StepTimes) -> tuple[str, ...]:
    lost = 1 - mean.tokens / mean.written if mean.written else 0.0
    return (
        f"{mean.seconds:.3g}",
        f"{mean.rollout_s:.3g}",
        f"{mean.train_s:.3g}",
        f"{100 * (1 - mean.train_s / mean.seconds):.0f}",
        f"{100 * mean.engines_idle:.0f}",
        f"{mean.tokens / mean.seconds:.0f}",
        f"{100 * max(0.0, lost):.0f}",
        f"{mean.staleness:.1f}/{mean.max_staleness}",
    )
