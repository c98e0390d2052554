"""What a filter says about a group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Keep the group, or reject it for a reason that ends up in the books and the metrics."""

    keep: bool
    reason: str | None = None


KEEP = Verdict(True)
