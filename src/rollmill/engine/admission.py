"""How many requests may be in flight, and who is next.

Counts requests, not groups. Waiting requests enter in order of arrival; a request of a named
sub-limit that is full (evaluation, say) does not hold up the ones behind it. Invariants: never
more than `max_in_flight` inside, never more than its number inside per sub-limit, and every
`enter` that returned True is matched by one `leave`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

BURST = 16
"""Requests admitted in one turn of the event loop: preparing a request takes a part of a
millisecond, and thousands of them in one turn would keep everything else waiting."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """One who waits: for which sub-limit, under which id, and what is to be told."""

    name: str | None
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
        self._limits: dict[str, int] = {}
        self._inside: Counter[str | None] = Counter()
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

    def limit(self, name: str, number: int) -> None:
        """Let at most `number` requests of sub-limit `name` be inside; may be changed later."""
        if number < 1:
            raise ValueError(f"limit {name!r}: expected 1 or more, found {number}")
        self._limits[name] = number
        self._admit()

    def inside(self, name: str) -> int:
        """Requests of sub-limit `name` in flight."""
        return self._inside[name]

    async def enter(self, name: str | None = None, *, rid: str = "") -> bool:
        """Wait for a place. False when `abort_waiting` was called meanwhile: then do not leave.

        Args:
            name: the sub-limit to count against.
            rid: who waits, for `abort_waiting`.

        Raises:
            ValueError: the sub-limit was never set.
        """
        if name is not None and name not in self._limits:
            raise ValueError(f"unknown limit {name!r}: expected one of {sorted(self._limits)}")
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(name, rid, future))
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.leave(name)  # cancelled in the moment of being admitted
            raise

    def leave(self, name: str | None = None) -> None:
        """Give the place back."""
        self._inside[name] -= 1
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

    def abort_waiting(self, rid_prefix: str = "") -> int:
        """Send everybody away who waits and whose id begins with `rid_prefix`; how many."""
        number = 0
        for waiting in self._waiting:
            if waiting.rid.startswith(rid_prefix) and not waiting.entered.done():
                waiting.entered.set_result(False)
                number += 1
        self._waiting = deque(w for w in self._waiting if not w.entered.done())
        return number

    def _admit(self) -> None:
        """Let in as many as may enter now, `BURST` of them in this turn of the event loop."""
        if self._is_closed or self._continuation is not None:
            return
        num_admitted = 0
        held_up: deque[_Waiting] = deque()
        while self._waiting and self._num_inside < self._max_in_flight and num_admitted < BURST:
            waiting = self._waiting.popleft()
            name = waiting.name
            if waiting.entered.done():
                continue
            if name is not None and self._inside[name] >= self._limits[name]:
                held_up.append(waiting)
                continue
            self._inside[name] += 1
            self._num_inside += 1
            num_admitted += 1
            waiting.entered.set_result(True)
        self._waiting.extendleft(reversed(held_up))
        if num_admitted:
            self._continuation = asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        self._continuation = None
        self._admit()
