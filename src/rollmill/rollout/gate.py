"""The gate that every engine request passes: a limit on requests, and a way to close.

Concurrency is counted in requests, not in groups. Closing the gate lets nothing more through and
ends everything that was started under it with `unless_closed`: whoever waits is told at once, so
that an abort finds no new requests behind the aborted ones, and no grader at work for nobody.

Invariants: never more than `limit` holders; nobody waits while there is room; nobody is let in
after `close`, not even who was handed a place just before it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class GateClosed(Exception):
    """The gate closed before (or while) the caller waited: a signal, not a user's error."""


class Gate:
    """At most `limit` holders at a time, in order of arrival; none once closed.

    Use as `async with gate:` around one engine request. A holder that is inside when the gate
    closes stays inside until its request ends.

    Args:
        limit: holders at a time, at least 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit: expected 1 or more, found {limit} (nobody would ever pass)")
        self._limit = limit
        self._held = 0
        self._high_water = 0
        self._is_closed = False
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._work: set[asyncio.Future[Any]] = set()

    @property
    def is_closed(self) -> bool:
        """True between `close` and `open`."""
        return self._is_closed

    @property
    def num_inside(self) -> int:
        """Requests under way."""
        return self._held

    @property
    def high_water(self) -> int:
        """Most requests under way at once since the gate was last opened."""
        return self._high_water

    def open(self) -> None:
        """Let requests through (again)."""
        self._is_closed = False
        self._high_water = self._held

    def close(self) -> None:
        """Let nothing more through; tell everyone who waits, end what `unless_closed` guards."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(False)
        for work in self._work:
            work.cancel()

    async def __aenter__(self) -> None:
        if self._is_closed:
            raise GateClosed
        if self._held < self._limit:
            self._enter()
            return
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            has_place = await waiter  # whoever leaves hands its place over
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self._leave()
            raise
        if has_place and self._is_closed:  # closed between the handing over and now
            self._leave()
        if not has_place or self._is_closed:
            raise GateClosed

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    async def unless_closed(self, work: Awaitable[T]) -> T:
        """The result of `work`, or GateClosed (and `work` cancelled) when the gate closes first."""
        if self._is_closed:
            if inspect.iscoroutine(work):
                work.close()
            raise GateClosed
        task = asyncio.ensure_future(work)
        self._work.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed and not is_being_cancelled():
                raise GateClosed from None
            raise
        finally:
            self._work.discard(task)

    def _enter(self) -> None:
        self._held += 1
        self._high_water = max(self._high_water, self._held)

    def _leave(self) -> None:
        self._held -= 1
        while self._waiting and self._held < self._limit:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._enter()
                waiter.set_result(True)


def is_being_cancelled() -> bool:
    """Whether somebody cancelled the current task.

    A CancelledError that arrives while this is False came out of the code that was called.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
