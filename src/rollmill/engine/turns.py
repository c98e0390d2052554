"""Keeping the event loop free while thousands of answers arrive at once.

Reading one long answer takes a few milliseconds of CPU that cannot be interrupted. Invariant: of
the tasks that wait for their turn, one goes on per turn of the event loop, in order of arrival, so
that nothing else waits for longer than one of them takes.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Call `take` before heavy work; share one among everything that does such work."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return when it is the caller's turn. May be cancelled."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._pass_on)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._is_taken = False
