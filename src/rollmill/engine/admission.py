"""How many requests may be in flight, and who is next.

Counts requests, not groups. Waiting requests enter in order of arrival. Invariants: never more than
`max_in_flight` inside, and every `enter` that returned True is matched by one `leave`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

BURST = 16
"""Requests admitted in one turn of the event loop: preparing a request takes a part of a
millisecond, and thousands of them in one turn would keep everything else waiting."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """One who waits: under which id, and what is to be told."""

    rid: str
    entered: asyncio.Future[bool]


class Admission:
    """The gate of the pool.

    Args:
        max_in_flight: requests that may be inside at once.
    """

    def __init__(self, max_in_flight: int) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight: expected 1 or more, found {max_in_flight}")
        self._max_in_flight = max_in_flight
        self._num_inside = 0
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self._left = asyncio.Event()
        self._continuation: asyncio.Handle | None = None

    @property
    def num_inside(self) -> int:
        """Requests in flight."""
        return self._num_inside

    @property
    def num_waiting(self) -> int:
        """Requests that wait to enter."""
        return sum(not waiting.entered.done() for waiting in self._waiting)

    async def enter(self, rid: str = "") -> bool:
        """Wait for a place. False when `abort_waiting` was called meanwhile: then do not leave.

        Args:
            rid: who waits, for `abort_waiting`.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(rid, future))
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.leave()  # cancelled in the moment of being admitted
            raise

    def leave(self) -> None:
        """Give the place back."""
        self._num_inside -= 1
        self._left.set()
        self._admit()

    async def until_empty(self) -> None:
        """Return when nobody is inside."""
        while self._num_inside:
            self._left.clear()
            await self._left.wait()

    def close(self) -> None:
        """Nobody enters until `open`; who is inside stays."""
        self._is_closed = True

    def open(self) -> None:
        """Let requests enter again."""
        self._is_closed = False
        self._admit()

    def abort_waiting(self, rid: str | None = None) -> int:
        """Send everybody away who waits, or only `rid`; how many."""
        number = 0
        for waiting in self._waiting:
            if rid in (None, waiting.rid) and not waiting.entered.done():
                waiting.entered.set_result(False)
                number += 1
        self._waiting = deque(w for w in self._waiting if not w.entered.done())
        return number

    def _admit(self) -> None:
        """Let in as many as may enter now, `BURST` of them in this turn of the event loop."""
        if self._is_closed or self._continuation is not None:
            return
        num_admitted = 0
        while self._waiting and self._num_inside < self._max_in_flight and num_admitted < BURST:
            waiting = self._waiting.popleft()
            if waiting.entered.done():
                continue
            self._num_inside += 1
            num_admitted += 1
            waiting.entered.set_result(True)
        if num_admitted:
            self._continuation = asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        self._continuation = None
        self._admit()
