"""What a live view can show while a batch is being collected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Counts of groups, and tokens written so far in this batch."""

    target: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    in_flight: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


ProgressListener = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """The listener of a run without a live view."""
