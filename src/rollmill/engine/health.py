"""The life of one engine, as a pure state machine: told what happened, it says which phase comes.

    dead → starting → stale → ready
      ↑________|________|_______|

An engine is *starting* until it first answers, *stale* until it serves the run's current weights,
and only then *ready*. The invariant: requests go to an engine only while `takes_requests`, which
implies that it has the current weights and that its last health check succeeded.

No clock and no I/O: callers pass the time in seconds (any monotonic clock).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FIRST_RESTART_DELAY_S = 0.5
LONGEST_RESTART_DELAY_S = 60.0


class Phase(StrEnum):
    """Where an engine is in its life."""

    DEAD = "dead"
    STARTING = "starting"
    STALE = "stale"
    READY = "ready"
    GIVEN_UP = "given_up"


@dataclass(slots=True)
class EngineHealth:
    """The phase of one engine.

    Args:
        max_strikes: health checks that must fail in a row before the engine is dead.
        max_restarts: failed starts in a row before it is given up; None never gives up. A start
            has failed when the engine dies before a health check succeeded while it was ready.
    """

    max_strikes: int
    max_restarts: int | None
    phase: Phase = Phase.DEAD
    strikes: int = 0
    is_doubted: bool = False
    has_proved_itself: bool = False
    failed_starts: int = 0
    num_deaths: int = 0
    restart_at: float = 0.0
    reason: str = "not started yet"

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go to this engine."""
        return self.phase is Phase.READY and self.strikes == 0 and not self.is_doubted

    @property
    def is_up(self) -> bool:
        """Whether the engine is believed to answer at all."""
        return self.phase in (Phase.STALE, Phase.READY)

    def restart_delay_s(self, now: float) -> float:
        """Seconds until a dead engine should be started."""
        return max(0.0, self.restart_at - now)

    def starting(self) -> None:
        """A start begins."""
        self._expect(Phase.DEAD)
        self.phase = Phase.STARTING
        self.has_proved_itself = False

    def answered(self) -> None:
        """A health check succeeded: a starting engine is up, a doubted one is trusted again."""
        if self.phase is Phase.STARTING:
            self.phase = Phase.STALE
        elif self.phase is Phase.READY:
            self.has_proved_itself = True
            self.failed_starts = 0
        self.strikes = 0
        self.is_doubted = False

    def is_there(self) -> None:
        """An engine that cannot generate now, because it is held, answered anything."""
        self.strikes = 0

    def current(self) -> None:
        """The engine confirmed that it serves the current weights."""
        if self.phase is Phase.STALE:
            self.phase = Phase.READY

    def outdated(self, reason: str) -> None:
        """The engine does not serve the current weights."""
        if self.phase is Phase.READY:
            self.phase = Phase.STALE
            self.reason = reason

    def doubted(self, reason: str) -> None:
        """A request met a broken connection: no new requests until a health check succeeds."""
        if self.is_up:
            self.is_doubted = True
            self.reason = reason

    def silent(self, now: float, reason: str) -> None:
        """A health check (or a weight update of a stale engine) failed: one strike."""
        if not self.is_up:
            return
        self.strikes += 1
        self.reason = reason
        if self.strikes >= self.max_strikes:
            self.lost(now, reason)

    def lost(self, now: float, reason: str) -> None:
        """The engine is gone: its process ended, its start failed, or it cannot be trusted."""
        if self.phase in (Phase.DEAD, Phase.GIVEN_UP):
            return
        self.failed_starts += not self.has_proved_itself
        self.num_deaths += 1
        self.strikes = 0
        self.is_doubted = False
        self.reason = reason
        if self.max_restarts is not None and self.failed_starts > self.max_restarts:
            self.phase = Phase.GIVEN_UP
            return
        self.phase = Phase.DEAD
        delay = FIRST_RESTART_DELAY_S * 2.0 ** min(self.failed_starts, 16)
        self.restart_at = now + min(LONGEST_RESTART_DELAY_S, delay)

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise ValueError(f"expected an engine that is {phase}, found one that is {self.phase}")
