"""Which failed calls may be sent again, and when. Pure.

The rule: a call is repeated only when repeating it is safe and may help. A 4xx says that the
request is wrong, so it never is; 429 and 503 say "later", so they slow the caller down instead
of failing it; broken connections and 502/504 are tried again a few times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum, auto

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0


class Verdict(Enum):
    """What an HTTP status means for the call."""

    DONE = auto()
    BUSY = auto()
    BROKEN_GATEWAY = auto()
    REFUSED = auto()
    FAILED = auto()


def judge_status(status: int) -> Verdict:
    """The meaning of an HTTP status."""
    if 200 <= status < 300:
        return Verdict.DONE
    if status in (429, 503):
        return Verdict.BUSY
    if status in (502, 504):
        return Verdict.BROKEN_GATEWAY
    return Verdict.REFUSED if 400 <= status < 500 else Verdict.FAILED


def backoff_delay(attempt: int, jitter: random.Random) -> float:
    """Seconds before try number `attempt` + 1: doubling, capped, with up to half taken off.

    The jitter keeps callers that failed together from coming back together.
    """
    longest = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempt, 16))
    return longest * jitter.uniform(0.5, 1.0)


@dataclass(slots=True)
class Throttle:
    """Holds new calls to an engine back after it said that it is busy.

    Each busy answer doubles the pause for every caller of this engine; each good answer ends it.
    Told the time by the caller, so it needs no clock.
    """

    num_busy: int = 0
    closed_until: float = 0.0

    def wait_s(self, now: float) -> float:
        """Seconds that a call arriving now should wait."""
        return max(0.0, self.closed_until - now)

    def busy(self, now: float, jitter: random.Random, retry_after_s: float | None = None) -> float:
        """The engine was busy; returns the seconds this caller should wait."""
        delay = backoff_delay(self.num_busy, jitter)
        if retry_after_s is not None:
            delay = max(delay, min(retry_after_s, LONGEST_DELAY_S))
        self.num_busy += 1
        self.closed_until = max(self.closed_until, now + delay)
        return delay

    def served(self) -> None:
        """The engine answered: open again."""
        self.num_busy = 0
        self.closed_until = 0.0
