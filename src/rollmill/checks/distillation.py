"""Checks of a distillation: recorded answers against the run, as its start will check them."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.checks.finding import Finding, error, ok, warning
from rollmill.config import Config
from rollmill.distill.manifest import FILE_NAME
from rollmill.loop.distill import open_recorded_source
from rollmill.loop.policy import Policy


def check_distillation(config: Config, policy: Policy) -> Iterator[Finding]:
    """The recorded answers of `opd.mode: offline`; nothing for other runs."""
    if config.opd.mode != "offline" or config.opd.data is None:
        return
    if not config.opd.data.exists():
        yield error(
            "opd.data",
            f"{config.opd.data} does not exist yet",
            "run `rollmill distill prepare` first",
        )
        return
    source = open_recorded_source(config, policy)
    recording = source.recording
    yield ok("opd.data", f"{len(recording.places)} recorded answers to {len(source)} prompts")
    for kind in recording.allowed:
        yield warning(
            "opd.allow_mismatch",
            f"goes on although {kind} differs"
            + ("" if recording.manifest else f" or cannot be told (no {FILE_NAME})"),
            "mend it when you can: the result is not that of the paper's method",
        )
