"""All checks in order, cheap ones first, and the report that people read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rollmill.checks import demonstrations, distillation, engines, inputs, machine, settings
from rollmill.checks.finding import Finding, Level, from_error, guarded
from rollmill.config import Config
from rollmill.config.load import load_config
from rollmill.errors import RollmillError
from rollmill.loop.policy import Policy, open_policy

MARKS = {
    Level.OK: ("ok", "green"),
    Level.WARNING: ("warning", "yellow"),
    Level.ERROR: ("error", "red"),
}


def check_all(path: Path, overrides: list[str], *, is_live: bool) -> Iterator[Finding]:
    """Every check of one configuration file.

    Args:
        path: the file.
        overrides: `section.field=value` changes.
        is_live: also start engines and trainer and compare them.
    """
    config: Config | None = None
    try:
        config = load_config(path, overrides)
    except RollmillError as problem:
        yield from_error("config", problem)
    if config is not None:
        yield from _check_config(config, path.resolve().parent, is_live)


def _check_config(config: Config, base_dir: Path, is_live: bool) -> Iterator[Finding]:
    checked = config
    yield from guarded("config", lambda: settings.check_settings(checked))
    yield from guarded("functions", lambda: inputs.check_functions(checked, base_dir))
    yield from guarded("threads", lambda: machine.check_threads(checked))
    yield from guarded("engine.port", lambda: machine.check_ports(checked))
    yield from guarded("run folder", lambda: machine.check_run_dir(checked))
    opened: list[Policy] = []

    def open_model() -> Iterator[Finding]:
        opened.append(open_policy(checked))
        yield from inputs.check_tokenizer(opened[0], checked)

    yield from guarded("model", open_model)
    if opened:
        yield from _check_with_model(config, opened[0], base_dir, is_live)


def _check_with_model(
    config: Config, policy: Policy, base_dir: Path, is_live: bool
) -> Iterator[Finding]:
    data, findings = inputs.load_all_data(config, policy, base_dir)
    yield from findings

    def check_data() -> Iterator[Finding]:
        if config.data.sft is None:
            return inputs.check_data(config, policy, data)
        return demonstrations.check_recorded(config, policy, data.train, data.evals)

    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("data", check_data),
        ("opd.data", lambda: distillation.check_distillation(config, policy)),
        ("reward", lambda: inputs.check_reward(config, data, base_dir)),
        ("engine.urls", lambda: engines.check_engine_urls(config, policy)),
        ("memory", lambda: machine.check_memory(config, policy)),
        ("disk", lambda: machine.check_disk(config, policy)),
    ]
    is_reachable = True
    for subject, check in checks:
        found = guarded(subject, check)
        is_reachable &= not (
            subject == "engine.urls" and any(f.level is Level.ERROR for f in found)
        )
        yield from found
    if is_live and is_reachable and data.train and config.needs_engines:
        from rollmill.checks.live import check_live

        yield from check_live(config, policy, data, base_dir)


def show(findings: Iterator[Finding], console: Console) -> bool:
    """Print the findings as they come; True when none is an error."""
    counts = dict.fromkeys(Level, 0)
    for finding in findings:
        counts[finding.level] += 1
        mark, colour = MARKS[finding.level]
        line = Text(f"{mark:<8}", style=colour) + Text(f"{finding.subject}: ", style="bold")
        console.print(line + Text(finding.text))
        if finding.fix and finding.level is not Level.OK:
            console.print(Text(f"{'':<8}→ {finding.fix}"))
    errors, warnings = counts[Level.ERROR], counts[Level.WARNING]
    console.print(f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    return counts[Level.ERROR] == 0
