"""Which groups make up a batch: a pure state machine, with no I/O and no clock.

It is told what happened (groups were submitted, one finished, one failed, one came back
unfinished) and answers what to do (how many to submit, accept or reject, whether it is done).
`target` groups are wanted: the batch size, or more when an over-sampling filter ranks them.
It never waits: a batch that cannot be filled ends in an error that counts the reasons.

Invariant, at every moment: submitted = in flight + accepted + surplus + rejected + failed +
returned.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rollmill.errors import RolloutError
from rollmill.filters.verdict import Verdict
from rollmill.sample import Group

FAILURE_WINDOW = 64
MIN_FAILURE_WINDOW = 8
NEVER_FULL = 1 << 62
"""A target that is never reached: the collector of a stream only counts."""


class BatchNotFilled(RolloutError):
    """Too many groups were turned down; they are here, so that they can be looked at.

    Attributes:
        rejected: groups that a filter turned down, with the reason.
        failed: groups given up, with the reason.
    """

    rejected: Sequence[tuple[Group, str]] = ()
    failed: Sequence[tuple[Group, str]] = ()


class Decision(StrEnum):
    """What becomes of a group that is done."""

    ACCEPT = "accept"
    SURPLUS = "surplus"
    REJECT = "reject"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CollectLimits:
    """How many groups, and when to give up.

    Attributes:
        target: groups wanted.
        submit_size: groups asked for at a time.
        max_consecutive_rejections: rejections in a row before giving up.
        max_refills: times that groups are asked for before giving up.
        when_short: at that limit, raise, or take rejected groups.
        max_failure_rate: share of the last groups that may fail.
        filter_name: named in the error.
    """

    target: int
    submit_size: int
    max_consecutive_rejections: int
    max_refills: int
    when_short: Literal["error", "keep"]
    max_failure_rate: float
    filter_name: str


class Collector:
    """Collects one batch. See the module for what it promises."""

    def __init__(self, limits: CollectLimits) -> None:
        self._limits = limits
        self._consecutive_rejections = 0
        self._num_refills = 0
        self._num_asked = 0
        self._recent: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self.num_submitted = 0
        self.num_in_flight = 0
        self.num_returned = 0
        self.accepted: list[Group] = []
        self.surplus: list[Group] = []
        self.rejected: list[tuple[Group, str]] = []
        self.failed: list[tuple[Group, str]] = []
        self.reasons: Counter[str] = Counter()

    @property
    def is_done(self) -> bool:
        """True when the batch is full."""
        return len(self.accepted) >= self._limits.target

    def num_to_submit(self) -> int:
        """Groups to submit now so that in flight + accepted reaches the target; 0 when it does.

        Each answer above 0 is a refill.

        Raises:
            RolloutError: refilled too often; the reasons of what was turned down are counted in it.
        """
        missing = self._limits.target - self.num_in_flight - len(self.accepted)
        if missing <= 0:
            return 0
        if self._num_refills >= self._limits.max_refills:
            self._num_refills = 0
            self._give_up_or_fill(
                f"{self._limits.max_refills} refills did not fill the batch",
                "rollout.filters.max_refills",
            )
            return self.num_to_submit()
        self._num_refills += 1
        rounds = -(-missing // self._limits.submit_size)
        return rounds * self._limits.submit_size

    def asked_for(self, num_groups: int) -> None:
        """Groups are asked for one by one, not as `num_to_submit` says: `submit_size` of them count
        as a refill.

        Raises:
            RolloutError: refilled too often.
        """
        self._num_asked += num_groups
        if self._num_asked > self._limits.max_refills * self._limits.submit_size:
            self._give_up_or_fill(
                f"{self._num_asked} groups did not fill the batch", "rollout.filters.max_refills"
            )

    def offer_ready(self, group: Group) -> Decision:
        """A group that finished and passed the filter in an earlier step."""
        self.num_submitted += 1
        return self._take(group)

    def submitted(self, num_groups: int) -> None:
        """Groups were sent off."""
        self.num_submitted += num_groups
        self.num_in_flight += num_groups

    def finished(self, group: Group, verdict: Verdict) -> Decision:
        """A group in flight is done and was judged.

        Raises:
            RolloutError: too many rejections in a row; the reasons are counted in it.
        """
        self.num_in_flight -= 1
        self._recent.append(False)
        if verdict.keep:
            self._consecutive_rejections = 0
            return self._take(group)
        reason = verdict.reason or "rejected"
        self.rejected.append((group, reason))
        self.reasons[reason] += 1
        self._consecutive_rejections += 1
        if self._consecutive_rejections >= self._limits.max_consecutive_rejections:
            self._consecutive_rejections = 0
            self._give_up_or_fill(
                f"the filter {self._limits.filter_name} rejected "
                f"{self._limits.max_consecutive_rejections} groups in a row",
                "rollout.filters.max_consecutive_rejections",
            )
        return Decision.REJECT

    def failed_group(self, group: Group, reason: str) -> Decision:
        """A group in flight cannot be used.

        Raises:
            RolloutError: too large a share of the last groups failed; it counts the reasons.
        """
        self.num_in_flight -= 1
        self.failed.append((group, reason))
        self._recent.append(True)
        rate = sum(self._recent) / len(self._recent)
        if len(self._recent) >= MIN_FAILURE_WINDOW and rate > self._limits.max_failure_rate:
            raise self._with_groups(
                f"{sum(self._recent)} of the last {len(self._recent)} groups failed",
                where="rollout",
                expected=f"a share of at most {self._limits.max_failure_rate:g} "
                "(rollout.max_failure_rate)",
                found=count_reasons(reason for _, reason in self.failed),
                fix="mend what the reasons name (`rollmill view` shows these answers under "
                "`dropped`) and start the same command again",
            )
        return Decision.FAIL

    def returned(self) -> None:
        """A group in flight came back unfinished (the batch was aborted)."""
        self.num_in_flight -= 1
        self.num_returned += 1

    def cut(self, kept: Sequence[Group], *, reject_rest: str | None) -> None:
        """Of the accepted groups only `kept` make the batch (an over-sampling filter chose).

        Args:
            kept: some of the accepted groups.
            reject_rest: the reason with which the others are rejected; None makes them surplus.
        """
        kept_ids = {id(group) for group in kept}
        rest = [group for group in self.accepted if id(group) not in kept_ids]
        self.accepted = [group for group in self.accepted if id(group) in kept_ids]
        if reject_rest is None:
            self.surplus = [*self.surplus, *rest]
            return
        self.rejected += [(group, reject_rest) for group in rest]
        self.reasons[reject_rest] += len(rest)

    def balance(self) -> dict[str, int]:
        """Groups by where they are; the values sum to `num_submitted`."""
        return {
            "in_flight": self.num_in_flight,
            "accepted": len(self.accepted),
            "surplus": len(self.surplus),
            "rejected": len(self.rejected),
            "failed": len(self.failed),
            "returned": self.num_returned,
        }

    def _take(self, group: Group) -> Decision:
        if self.is_done:
            self.surplus.append(group)
            return Decision.SURPLUS
        self.accepted.append(group)
        return Decision.ACCEPT

    def _with_groups(self, what: str, **parts: str) -> BatchNotFilled:
        error = BatchNotFilled(what, **parts)
        error.rejected, error.failed = tuple(self.rejected), tuple(self.failed)
        return error

    def _give_up_or_fill(self, what: str, limit: str) -> None:
        """End with an error, or take rejected groups, the oldest first, until the batch is full.

        Without a group to take the error comes either way: else it would be the same again.
        """
        if self._limits.when_short == "error" or not self.rejected:
            turned_down = (reason for _, reason in (*self.rejected, *self.failed))
            raise self._with_groups(
                what,
                where="rollout.filters",
                expected=f"groups that pass ({limit})",
                found=count_reasons(turned_down)
                + f"; accepted so far: {len(self.accepted)}"
                + ("" if self._limits.target >= NEVER_FULL else f" of {self._limits.target}"),
                fix="look at these answers (`rollmill view`, under `dropped`); choose prompts of "
                "fitting difficulty, loosen the filter, or set rollout.filters.when_short to keep",
            )
        num_taken = min(len(self.rejected), max(0, self._limits.target - len(self.accepted)))
        for group, reason in self.rejected[:num_taken]:
            self.reasons[reason] -= 1
            self.accepted.append(group)
        del self.rejected[:num_taken]


def count_reasons(reasons: Iterable[str]) -> str:
    """Reasons with their counts, most frequent first, for an error message."""
    counted = Counter(reasons).most_common(5)
    return ", ".join(f"{count} × {reason}" for reason, count in counted) or "none"
