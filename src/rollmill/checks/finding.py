"""What a check says: ok, a warning or an error, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from rollmill.errors import RollmillError


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        level: how bad it is.
        subject: what was looked at (`data`, `rollout.sampling.top_p`).
        text: what was found.
        fix: what to do; None when there is nothing to do.
    """

    level: Level
    subject: str
    text: str
    fix: str | None = None


def ok(subject: str, text: str) -> Finding:
    """Nothing wrong."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """The run would start, and probably not do what is meant."""
    return Finding(Level.WARNING, subject, text, fix)


def error(subject: str, text: str, fix: str) -> Finding:
    """The run would not start, or would be worthless."""
    return Finding(Level.ERROR, subject, text, fix)


def from_error(subject: str, problem: RollmillError) -> Finding:
    """An error of ours as a line of the report."""
    details = "; ".join(f"{label} {text}" for label, text in problem.parts() if label != "fix")
    text = problem.what + (f" ({' '.join(details.split())})" if details else "")
    return Finding(Level.ERROR, subject, text, problem.fix)


def guarded(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run one check; an error of ours that it meets is its finding."""
    try:
        return list(check())
    except RollmillError as problem:
        return [from_error(subject, problem)]
