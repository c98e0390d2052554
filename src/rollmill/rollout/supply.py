"""Groups for one step: fresh, waiting and ready ones, none older than the staleness bound.

Staleness is dealt with here and nowhere else, when work is taken up: a group whose oldest
trainable token is too old is masked or starts afresh. So no batch ever holds an older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import State
from rollmill.data.source import DataSource
from rollmill.errors import HookError
from rollmill.rollout.books import Books
from rollmill.rollout.fresh import is_all_stale, is_stale, mask_stale, restart_group
from rollmill.rollout.usage import Loss, Usage
from rollmill.sample import Group


@dataclass(frozen=True)
class StepSupply:
    """Where the round of one step gets groups and where they go back to.

    Attributes:
        config: the `rollout` section.
        source: of fresh prompts and of unfinished groups.
        books: of this step.
        usage: counts what is thrown away.
        version: weights that this step's answers are written by.
        ready: groups that finished in earlier steps and were in no batch; taken once.
    """

    config: RolloutConfig
    source: DataSource
    books: Books
    usage: Usage
    version: int
    ready: Sequence[Group] = ()

    def take(self, count: int) -> list[Group]:
        """Exactly `count` groups from the source, booked as in flight.

        Raises:
            HookError: the source gave another number of groups.
        """
        groups = self.source.take(count)
        if len(groups) != count:
            raise HookError(
                "the data source gave another number of groups than asked for",
                where="take",
                expected=f"exactly {count}, beginning again when the data ends",
                found=str(len(groups)),
            )
        for group in groups:
            if self.books.state_of(group) is None:
                self.books.record(group, State.ISSUED)
            if self._starts_afresh(group):
                self.books.record(group, State.ISSUED)
            self.books.record(group, State.IN_FLIGHT)
        return groups

    def take_ready(self) -> list[Group]:
        """The ready groups that may still be trained on, in order; stale prompts start afresh."""
        usable = []
        for group in sorted(self.ready, key=lambda g: g.group_index):
            if self._starts_afresh(group):
                self.books.record(group, State.ISSUED)
                self.source.give_back([group])
            else:
                usable.append(group)
        return usable

    def give_back(self, group: Group) -> None:
        """Return an unfinished group."""
        self.source.give_back([group])

    def _starts_afresh(self, group: Group) -> bool:
        """True when the group was too old and is a fresh prompt now."""
        oldest_allowed = self.version - self.config.max_staleness
        if not is_stale(group, oldest_allowed):
            return False
        if self.config.mask_off_policy and not is_all_stale(group, oldest_allowed):
            mask_stale(group, oldest_allowed)
            return False
        self.usage.lose(Loss.STALE, group.samples)
        restart_group(group)
        return True
