"""The command `rollmill plan`, ready to be registered with typer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.field=value …]", help="Changes to the YAML file."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run folder to measure speeds in.")
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A figure to assume; may be given many times."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to simulate.", min=2)] = 30,
) -> None:
    """Simulate CONFIG's steps: how long they take, what waits for what, and the memory.

    Speeds are measured in a run (--trace RUN), stated (--assume tokens_per_second=2000), or both.
    """
    from rich.console import Console

    from rollmill.checks.machine import available_memory, memory_estimate
    from rollmill.config.load import load_config
    from rollmill.errors import RollmillError
    from rollmill.loop.policy import open_policy
    from rollmill.loop.run_dir import RunDir
    from rollmill.plan.assumptions import stated
    from rollmill.plan.fit import fit
    from rollmill.plan.report import show_assumptions, show_memory, show_schedules
    from rollmill.plan.setup import alternatives, contention_of, schedule_of

    settings = load_config(config, overrides or [])
    texts = assume or []
    measured, is_contention_measured = None, False
    if trace is not None:
        traced = schedule_of(load_config(RunDir(trace).config))
        is_contention_measured = traced.max_staleness is not None
        measured = fit(trace, traced)
    assumptions = stated(texts, measured.assumptions if measured else None)
    if not (is_contention_measured or any(text.startswith("contention=") for text in texts)):
        assumptions = replace(assumptions, contention=contention_of(settings))
    console = Console(highlight=False, soft_wrap=True)
    show_assumptions(console, assumptions, measured, num_stated=len(texts))
    show_schedules(console, alternatives(schedule_of(settings)), assumptions, steps)
    try:
        uses = memory_estimate(settings, open_policy(settings))
    except RollmillError as error:  # plans may be made where the model is not
        console.print(f"memory: not estimated: {error.what}", markup=False)
    else:
        show_memory(console, uses, available_memory())
