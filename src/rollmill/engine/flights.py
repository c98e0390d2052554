"""The requests in flight on one engine.

Each is a task of its own, so that it can be ended without cancelling its caller: when the engine
dies or never answers an abort, the caller gets an error to act on. Invariant: `load` is the sum of
the costs of the flights.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineCallError, EngineTimeout
from rollmill.engine.types import GenerateResult

FIRST_ABORT_WAIT_S = 0.2
LONGEST_ABORT_WAIT_S = 2.0
ABORTS_AT_ONCE = 32
CUTS_PER_TURN = 64
"""Callers told in one turn of the event loop that their request is given up."""


@dataclass(eq=False, slots=True)
class Flight:
    """One sending of a request, on its way.

    Attributes:
        rid: what the engine knows it by.
        request: the id of the request, the same for every sending of it.
        cost: its part of the load.
        task: the call.
        error: what it was ended with.
    """

    rid: str
    request: str
    cost: int
    task: asyncio.Task[GenerateResult]
    error: EngineCallError | None = None

    def cut(self, error: EngineCallError) -> None:
        """End the request with `error`, unless it has ended."""
        if not self.task.done():
            self.error = copy.copy(error)  # its own traceback for every caller
            self.task.cancel()


class Flights:
    """All requests in flight on one engine.

    Args:
        client: the engine.
        is_shared: others use the engine too, so only our own requests may be aborted.
    """

    def __init__(self, client: EngineClient, *, is_shared: bool) -> None:
        self.load = 0
        self._client = client
        self._is_shared = is_shared
        self._flights: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._flights)

    async def carry(
        self, rid: str, cost: int, work: Coroutine[Any, Any, GenerateResult], *, request: str
    ) -> GenerateResult:
        """Await `work` as a flight; `cost` counts towards the engine's load meanwhile.

        Args:
            rid: what the engine knows this sending by.
            cost: a part of the load.
            work: the call.
            request: the id of the request.

        Raises:
            EngineCallError: as `work` raises, or as given to `cut`.
        """
        flight = Flight(rid, request, cost, asyncio.ensure_future(work))
        self._flights.add(flight)
        self.load += cost
        try:
            return await flight.task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if flight.error is not None and (caller is None or not caller.cancelling()):
                raise flight.error from None
            raise
        finally:
            self._flights.discard(flight)
            self.load -= cost

    def cut(self, error: EngineCallError) -> None:
        """End every flight with `error`."""
        for flight in list(self._flights):
            flight.cut(error)

    def of(self, request: str | None) -> list[Flight]:
        """The flights of a request, by its id; of every request for None."""
        return [flight for flight in self._flights if request in (None, flight.request)]

    async def abort_until_idle(self, deadline_s: float, request: str | None = None) -> int:
        """Abort the requests in flight now, or only this one; returns how many did not answer by
        the deadline.

        The abort is sent again and again, as engines have been seen to lose one. Requests that
        do not answer are given up: their calls end with `EngineTimeout`.
        """
        flights = self.of(request)
        if not flights:
            return 0
        is_everything = not self._is_shared and request is None
        sender = asyncio.create_task(self._send_aborts(flights, is_everything=is_everything))
        try:
            await asyncio.wait({flight.task for flight in flights}, timeout=deadline_s)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        unanswered = [flight for flight in flights if not flight.task.done()]
        for number, flight in enumerate(unanswered, start=1):
            flight.cut(self._no_answer(flight, deadline_s))
            if number % CUTS_PER_TURN == 0:
                await asyncio.sleep(0)
        return len(unanswered)

    async def _send_aborts(self, flights: list[Flight], *, is_everything: bool) -> None:
        wait_s = FIRST_ABORT_WAIT_S
        while True:
            left = [flight for flight in flights if not flight.task.done()]
            if not left:
                return
            if is_everything:
                with suppress(EngineCallError):  # silence shows in the deadline
                    await self._client.abort_all()
            else:
                await self._abort_each(left)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_ABORT_WAIT_S)

    async def _abort_each(self, flights: list[Flight]) -> None:
        """One abort per request, a few at a time: thousands at once would need as many connections
        again, and keep the event loop busy for a second."""
        left = iter(flights)

        async def abort_some() -> None:
            for flight in left:
                if not flight.task.done():
                    with suppress(EngineCallError):
                        await self._client.abort(flight.rid)

        await asyncio.gather(*(abort_some() for _ in range(ABORTS_AT_ONCE)))

    def _no_answer(self, flight: Flight, deadline_s: float) -> EngineTimeout:
        return EngineTimeout(
            "the engine did not answer an abort",
            where=f"request {flight.rid} on {self._client.url}",
            expected=f"the request to end within {deadline_s:g} s",
        )
