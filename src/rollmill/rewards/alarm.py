"""Noticing that grading went wrong: a sudden share of invalid, timed-out or failed answers.

A pure state machine: it is told the outcomes of each batch and answers with alarms. A model that
stops writing boxes, a data set with broken labels or a dead judging server show here first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rollmill.rewards.outcome import OutcomeKind

WATCHED = (OutcomeKind.INVALID, OutcomeKind.TIMEOUT, OutcomeKind.ERROR)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A share that jumped.

    Attributes:
        kind: which outcome.
        share: its share of the batch.
        usual: its share before.
        num_answers: answers in the batch.
    """

    kind: OutcomeKind
    share: float
    usual: float
    num_answers: int

    def __str__(self) -> str:
        return (
            f"rewards: {self.share:.0%} of {self.num_answers} answers ended as "
            f"{self.kind.value}, usually {self.usual:.0%}"
        )


class OutcomeAlarm:
    """Compares each batch with the ones before.

    A share sounds the alarm when it is above the usual one by `jump` and by more than chance
    explains (`sigmas` standard deviations of a binomial). The usual share is an exponential mean
    over batches; the first batch is compared with 0.

    Args:
        jump: least increase that matters, as a share.
        sigmas: least increase in standard deviations.
        memory: weight of the past at each batch, below 1.
    """

    def __init__(self, *, jump: float = 0.1, sigmas: float = 4.0, memory: float = 0.8) -> None:
        self._jump = jump
        self._sigmas = sigmas
        self._memory = memory
        self._usual: dict[OutcomeKind, float] | None = None

    def update(self, outcomes: Iterable[OutcomeKind | str]) -> list[Alarm]:
        """Take the outcomes of a batch; the alarms that they sound."""
        counts = Counter(OutcomeKind(outcome) for outcome in outcomes)
        num_answers = counts.total()
        if num_answers == 0:
            return []
        shares = {kind: counts[kind] / num_answers for kind in WATCHED}
        usual = self._usual or dict.fromkeys(WATCHED, 0.0)
        alarms = [
            Alarm(kind, shares[kind], usual[kind], num_answers)
            for kind in WATCHED
            if shares[kind] - usual[kind] > self._threshold(usual[kind], num_answers)
        ]
        past = self._memory if self._usual is not None else 0.0
        self._usual = {kind: past * usual[kind] + (1 - past) * shares[kind] for kind in WATCHED}
        return alarms

    def _threshold(self, usual: float, num_answers: int) -> float:
        spread = math.sqrt(max(usual * (1 - usual), 1 / num_answers) / num_answers)
        return max(self._jump, self._sigmas * spread)
