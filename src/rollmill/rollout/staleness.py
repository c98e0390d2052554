"""Which groups are trained on, and when, so that none is ever older than S versions: pure.

Words. A weight *version* V is the number of training steps done. A group is *admitted* at the
version v that was served when it was submitted, so none of its tokens is older than v. Step t
trains weights of version t - 1; a group admitted at v is within the bound S at step t when
t - 1 - v <= S, that is t <= v + S + 1: its *deadline*. *Live* groups are admitted and neither in a
batch nor gone (rejected, failed). B is the batch size, T the number of batches taken (T = V while
no batch is being trained on, T = V + 1 while one is).

Two rules.

1. Admission: at most (S + 1 - (T - V)) * B groups are live.
2. Batches: the first B finished groups in order of admission are a batch for step t = T + 1 when,
   for every k from 0 to S, at least N(t + k) - k * B of them have a deadline of at most t + k; N(d)
   counts live groups with a deadline of at most d. Otherwise the batch waits.

Claim: no group is in the batch of a step after its deadline. Proof, by the invariant that before
step t (with T = t - 1) for every k >= 0: N(t + k) <= (k + 1) * B. It holds at first, with no live
groups. Admission at version V gives groups the deadline V + S + 1, which is t + S while T = V and
t + S - 1 while T = V + 1. No live group has a later one, so only N(t + S), or N(t + S - 1), and
what lies above it grows; rule 1 bounds it by (S + 1) * B, or S * B, which the invariant allows. A
batch that rule 2 lets pass leaves N(t + k) <= k * B; with t' = t + 1 and k' = k - 1 that is the
invariant again. Groups that go only make N smaller. With k = 0, rule 2 says that every live group
whose deadline is t is in the batch of step t, so none is left behind. []

Progress: when all live groups are finished and B of them are live, the first B pass rule 2,
because they hold min(B, N(t + k)) of those with a deadline of at most t + k, and
N(t + k) <= (k + 1) * B. So a batch waits only for groups that are in flight. Taking finished
groups in order of admission, not of finishing, keeps short answers from crowding out long ones;
how much they still do is measured.

S = 0 is on-policy training: B groups are admitted, all of them are the batch, and none is admitted
while it is trained on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Live:
    version: int
    is_finished: bool = False


class StalenessGate:
    """Decides how many groups to admit and which finished ones make the next batch.

    Args:
        batch_size: B.
        max_staleness: S.
        version: of the weights that are served at first.
        last_step: of the run: groups that no batch up to it needs are not admitted. None is no end.
    """

    def __init__(
        self, *, batch_size: int, max_staleness: int, version: int = 0, last_step: int | None = None
    ) -> None:
        self._batch_size = batch_size
        self._bound = max_staleness
        self._last_step = last_step
        self._version = version
        self._num_taken = version
        self._live: OrderedDict[int, _Live] = OrderedDict()
        self._num_finished = 0

    @property
    def version(self) -> int:
        """V, the version that new groups are admitted at."""
        return self._version

    @property
    def num_live(self) -> int:
        """Groups admitted and neither in a batch nor gone."""
        return len(self._live)

    def num_to_admit(self) -> int:
        """How many groups may be submitted now (rule 1), and are needed."""
        num_batches = self._bound + 1 - (self._num_taken - self._version)
        if self._last_step is not None:
            num_batches = min(num_batches, self._last_step - self._num_taken)
        return max(0, num_batches * self._batch_size - len(self._live))

    def admit(self, group: int) -> None:
        """A group was submitted, to be written by the version served now or a later one."""
        if group in self._live:
            raise ValueError(f"group {group} is live already")
        if not self.num_to_admit():
            raise ValueError("no group may be admitted now")
        self._live[group] = _Live(self._version)

    def finish(self, group: int) -> None:
        """A live group is finished, judged and worth training on."""
        live = self._live[group]
        self._num_finished += not live.is_finished
        live.is_finished = True

    def restore(self, group: int, version: int) -> bool:
        """A finished group of an earlier process, whose oldest token `version` wrote.

        Call in ascending order of version, before anything is admitted.

        Returns:
            False when there is no place: with it, some group would miss its deadline (the earlier
            process had another bound, batch size, or no bound at all). The group is not live then.
        """
        deadline = version + self._bound + 1
        step = self._num_taken + 1
        num_due = 1 + len(self._live)  # all of them are due by then: versions ascend
        if deadline < step or num_due > (deadline - step + 1) * self._batch_size:
            return False
        self._live[group] = _Live(version, is_finished=True)
        self._num_finished += 1
        return True

    def drop(self, group: int) -> None:
        """A live group is gone: rejected, failed or given back."""
        self._num_finished -= self._live.pop(group).is_finished

    def take_batch(self) -> list[int] | None:
        """The groups of the next step, in order of admission; None when it must wait (rule 2)."""
        if self._num_finished < self._batch_size:
            return None
        chosen = [g for g, live in self._live.items() if live.is_finished][: self._batch_size]
        if not self._may_take(chosen):
            return None
        for group in chosen:
            self.drop(group)
        self._num_taken += 1
        return chosen

    def trained(self, version: int) -> None:
        """The weights of `version` are served from now on.

        Raises:
            ValueError: versions go up, and never past the batches taken.
        """
        if not self._version <= version <= self._num_taken:
            raise ValueError(
                f"expected a version from {self._version} to {self._num_taken}, found {version}"
            )
        self._version = version

    def _may_take(self, chosen: list[int]) -> bool:
        step = self._num_taken + 1
        for k in range(self._bound + 1):
            newest = step + k - self._bound - 1  # admitted up to here: deadline at most step + k
            due = sum(live.version <= newest for live in self._live.values())
            taken = sum(self._live[group].version <= newest for group in chosen)
            if taken < due - k * self._batch_size:
                return False
        return True
