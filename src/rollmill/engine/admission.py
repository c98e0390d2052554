"""How many requests may be in flight, and who is next.

Counts requests, not groups. Waiting requests enter in order of arrival; a request of a named
sub-limit that is full (evaluation, say) does not hold up the ones behind it. Invariants: never
more than `max_in_flight` inside, never more than its number inside per sub-limit, and every
`enter` that returned True is matched by one `leave`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

BURST = 16
"""Requests admitted in one turn of the event loop: preparing a request takes a part of a
millisecond, and thousands of them in one turn would keep everything else waiting."""


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
        self._waiting: deque[tuple[str | None, asyncio.Future[bool]]] = deque()
        self._is_closed = False
        self._continuation: asyncio.Handle | None = None

    @property
    def num_inside(self) -> int:
        """Requests in flight."""
        return self._num_inside

    @property
    def num_waiting(self) -> int:
        """Requests that wait to enter."""
        return sum(not future.done() for _, future in self._waiting)

    def limit(self, name: str, number: int) -> None:
        """Let at most `number` requests of sub-limit `name` be inside; may be changed later."""
        if number < 1:
            raise ValueError(f"limit {name!r}: expected 1 or more, found {number}")
        self._limits[name] = number
        self._admit()

    def inside(self, name: str) -> int:
        """Requests of sub-limit `name` in flight."""
        return self._inside[name]

    async def enter(self, name: str | None = None) -> bool:
        """Wait for a place. False when `abort_waiting` was called meanwhile: then do not leave.

        Raises:
            ValueError: the sub-limit was never set.
        """
        if name is not None and name not in self._limits:
            raise ValueError(f"unknown limit {name!r}: expected one of {sorted(self._limits)}")
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, future))
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
        self._admit()

    def close(self) -> None:
        """Nobody enters until `open`; who is inside stays."""
        self._is_closed = True

    def open(self) -> None:
        """Let requests enter again."""
        self._is_closed = False
        self._admit()

    def abort_waiting(self) -> int:
        """Send everybody who waits away; returns how many."""
        number = 0
        for _, future in self._waiting:
            if not future.done():
                future.set_result(False)
                number += 1
        self._waiting.clear()
        return number

    def _admit(self) -> None:
        """Let in as many as may enter now, `BURST` of them in this turn of the event loop."""
        if self._is_closed or self._continuation is not None:
            return
        num_admitted = 0
        held_up: deque[tuple[str | None, asyncio.Future[bool]]] = deque()
        while self._waiting and self._num_inside < self._max_in_flight and num_admitted < BURST:
            name, future = self._waiting.popleft()
            if future.done():
                continue
            if name is not None and self._inside[name] >= self._limits[name]:
                held_up.append((name, future))
                continue
            self._inside[name] += 1
            self._num_inside += 1
            num_admitted += 1
            future.set_result(True)
        self._waiting.extendleft(reversed(held_up))
        if num_admitted:
            self._continuation = asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        self._continuation = None
        self._admit()
