"""What one round of collecting gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollmill.sample import Group


@dataclass(slots=True)
class RolloutBatch:
    """A full batch, and what else became of the groups that were touched.

    Attributes:
        groups: exactly the batch size, ascending by group index.
        rejected: groups that a filter turned down, with the reason.
        failed: groups that could not be completed, with the reason.
        metrics: `rollout/…` and `reward/…` figures of this batch.
    """

    groups: list[Group]
    rejected: list[tuple[Group, str]] = field(default_factory=list)
    failed: list[tuple[Group, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
