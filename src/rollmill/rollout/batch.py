"""What one round of collecting gave, and what the loop needs of whoever collects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Rollouts(Protocol):
    """Where a training loop gets its batches: generated (`RolloutManager`) or recorded ones."""

    async def collect(self, *, step: int, version: int) -> RolloutBatch:
        """One full batch for `step`; the weights are those of `version`."""

    def consumed(self, batch: RolloutBatch, step: int) -> None:
        """The batch was trained on at `step`: final for all its groups."""

    def weights_changed(self, version: int) -> None:
        """The weights are those of `version` now."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as msgpack values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a position that `state_dict` gave."""

    def forget_everything(self) -> None:
        """Before a run without a checkpoint: whatever a killed one booked did not happen."""

    async def close(self) -> None:
        """End what goes on between batches."""
