"""The ledger as one step's rollouts see it."""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.data.ledger import Ledger, State
from rollmill.sample import Group


@dataclass(frozen=True, slots=True)
class Books:
    """Records what becomes of groups during `step`."""

    ledger: Ledger
    step: int

    def record(self, group: Group, state: State, reason: str | None = None) -> None:
        """Move a group to a state, with its tokens."""
        self.ledger.record(
            group.group_index,
            state,
            step=self.step,
            reason=reason,
            num_tokens=group.num_response_tokens,
        )

    def state_of(self, group: Group) -> State | None:
        """Where a group is; None when it is final or was never issued."""
        return self.ledger.state_of_live(group.group_index)
