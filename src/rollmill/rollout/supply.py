"""Groups for one step: fresh, waiting and ready ones, none older than the staleness bound.

What is kept and what is thrown away is decided here and nowhere else, attempt by attempt.
Invariants: a finished attempt is thrown away only when it is too old; no batch ever holds a token
that is too old and in the loss.

- When a batch ends, an unfinished group comes back: its finished attempts keep their answers, the
  others start afresh (with partial rollout they keep what they have).
- When work is taken up, attempts with too old trainable tokens are masked or start afresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import State
from rollmill.data.source import DataSource
from rollmill.errors import HookError, RollmillError
from rollmill.rollout.books import Books
from rollmill.rollout.fresh import (
    is_all_stale,
    is_fresh,
    is_stale,
    is_unfinished,
    mask_stale,
    restart_attempts,
    restart_group,
)
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
            HookError: the source raised, or gave another number of groups.
        """
        groups = take_exactly(self.source, count)
        for group in groups:
            if self.books.state_of(group) is None:
                self.books.record(group, State.ISSUED)
            self._renew(group)
            if self.books.state_of(group) is State.WAITING and is_fresh(group):
                self.books.record(group, State.ISSUED)
            self.books.record(group, State.IN_FLIGHT)
        return groups

    def take_ready(self) -> list[Group]:
        """The ready groups that may still be trained on, in order; the others go to the source."""
        usable = []
        for group in sorted(self.ready, key=lambda g: g.group_index):
            if self._drop_stale(group):
                self._put_back(group)
            else:
                usable.append(group)
        return usable

    def give_back(self, group: Group) -> None:
        """Return a group in flight that is unfinished, with what of it is kept."""
        if not self.config.partial_rollout:
            self.usage.lose(Loss.ABORTED, restart_attempts(group, is_unfinished))
        self._put_back(group)

    def start_afresh(self, group: Group) -> None:
        """Return a ready group that cannot be trained on in time, as the prompt it was."""
        self.usage.lose(Loss.STALE, restart_group(group))
        self._put_back(group)

    def _put_back(self, group: Group) -> None:
        self.books.record(group, State.ISSUED if is_fresh(group) else State.WAITING)
        self.source.give_back([group])

    def _renew(self, group: Group) -> None:
        """Leave nothing in a group from the source that may be too old when it is trained on."""
        if not self.config.asynchronous:
            self._drop_stale(group)
        elif not is_fresh(group):  # the age of rollouts ahead counts from their admission
            self.usage.lose(Loss.STALE, restart_group(group))

    def _drop_stale(self, group: Group) -> bool:
        """Mask what is too old, or start those attempts afresh; True when one does.

        Masked attempts still count in the statistics of their group. A group that would teach
        nothing when masked starts afresh as a whole.
        """
        oldest_allowed = self.version - self.config.max_staleness
        if not is_stale(group.samples, oldest_allowed):
            return False
        masks = self.config.mask_off_policy
        if masks and not is_all_stale(group, oldest_allowed):
            mask_stale(group, oldest_allowed)
            return False
        lost = restart_attempts(group, lambda each: masks or is_stale(each, oldest_allowed))
        self.usage.lose(Loss.STALE, lost)
        return True


def take_exactly(source: DataSource, count: int) -> list[Group]:
    """`count` groups of a source, which may be the user's own.

    Raises:
        HookError: it raised, or gave another number of groups.
    """
    try:
        groups = list(source.take(count))
    except RollmillError:
        raise
    except Exception as error:
        raise HookError(
            "the data source raised",
            where="take (rollout.hooks.data_source)",
            expected=f"{count} groups",
            found=f"{type(error).__name__}: {error}",
            fix="mend the source's take",
        ) from error
    if len(groups) != count:
        raise HookError(
            "the data source gave another number of groups than asked for",
            where="take (rollout.hooks.data_source)",
            expected=f"exactly {count}, beginning again when the data ends",
            found=str(len(groups)),
            fix="wrap around to the first row when the rows end",
        )
    return groups
