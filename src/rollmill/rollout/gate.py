"""The gate that every engine request passes: a limit on requests, and a way to close.

Concurrency is counted in requests, not in groups. Closing the gate lets nothing more through:
whoever waits is told at once, so that an abort finds no new requests behind the aborted ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class GateClosed(Exception):
    """The gate closed before (or while) the caller waited: a signal, not a user's error."""


class Gate:
    """At most `limit` holders at a time, in order of arrival; none once closed.

    Use as `async with gate:` around one engine request. A holder that is inside when the gate
    closes stays inside until its request ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._high_water = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """True between `close` and `open`."""
        return self._closed.is_set()

    @property
    def num_inside(self) -> int:
        """Requests under way."""
        return self._held

    @property
    def high_water(self) -> int:
        """Most requests under way at once since the gate was made."""
        return self._high_water

    def open(self) -> None:
        """Let requests through (again)."""
        self._closed.clear()

    def close(self) -> None:
        """Let nothing more through and tell everyone who waits."""
        self._closed.set()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(GateClosed())

    async def __aenter__(self) -> None:
        if self.is_closed:
            raise GateClosed
        if self._held < self._limit and not self._waiting:
            self._enter()
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter  # whoever leaves hands its place over
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    async def unless_closed(self, work: Awaitable[T]) -> T:
        """The result of `work`, or GateClosed (and `work` cancelled) when the gate closes first."""
        task = asyncio.ensure_future(work)
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise GateClosed
        finally:
            closed.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _enter(self) -> None:
        self._held += 1
        self._high_water = max(self._high_water, self._held)

    def _leave(self) -> None:
        self._held -= 1
        while self._waiting and self._held < self._limit:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._enter()
                waiter.set_result(None)
