"""Calls that concern every engine at once: pause, weights, memory.

Invariants: requests enter the pool only while nothing is paused and no memory is released; after
`update_weights` returns, no engine without the new weights gets a request; an engine that fails a
call which others obeyed is taken out (and started again), because nobody knows what state it is in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rollmill.engine.admission import Admission
from rollmill.engine.client import MemoryTag
from rollmill.engine.delivery import Delivery
from rollmill.engine.errors import EngineCallError, EngineRefused, WrongVersion
from rollmill.engine.health import Phase
from rollmill.engine.member import Member
from rollmill.engine.types import HoldMode
from rollmill.engine.weight_calls import WeightSums
from rollmill.engine.weight_state import WeightState

logger = logging.getLogger(__name__)

Failures = list[tuple[Member, EngineCallError]]


class Control:
    """Control calls of the pool.

    Args:
        members: the pool's engines.
        weights: what they should serve.
        admission: the gate for requests.
    """

    def __init__(
        self, members: Sequence[Member], weights: WeightState, admission: Admission
    ) -> None:
        self._members = members
        self._weights = weights
        self._admission = admission

    async def pause(self, mode: HoldMode) -> None:
        """Hold generation on every engine, and new requests at the gate."""
        self._weights.is_paused = True
        self._set_gate()
        if mode == "drain":  # each request has a deadline, so this ends
            await self._admission.until_empty()
        held = "retract" if mode == "drain" else mode
        await self._on_all("pause", lambda member: member.client.pause(held))

    async def resume(self) -> None:
        """Go on; the gate opens even when an engine does not obey."""
        self._weights.is_paused = False
        try:
            await self._on_all("continue", lambda member: member.client.resume())
        finally:
            self._set_gate()

    async def flush_cache(self) -> None:
        """Have every engine forget its cached prefixes."""
        await self._on_all("flush", lambda member: member.client.flush_cache())

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Free the named parts of memory on every engine, and hold requests meanwhile."""
        self._weights.released.update(tags)
        self._set_gate()
        await self._on_all("release memory of", lambda m: m.release_memory(tags))

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the named parts of memory again; the gate opens when none is left."""
        await self._on_all("resume memory of", lambda m: m.resume_memory(tags))
        self._weights.released.difference_update(tags)
        self._set_gate()

    async def install(self, delivery: Delivery, version: int, *, flush_cache: bool) -> None:
        """Give every ready engine the delivered weights and have it confirm `version`.

        Engines that are not ready now get them before they are.

        Raises:
            EngineError: no engine took the weights; the old version stays the expected one.
        """
        members = [member for member in self._members if member.health.phase is Phase.READY]
        self._weights.installing = version
        try:
            failures = await self._deliver(delivery, members, version, flush_cache=flush_cache)
            if members and len(failures) == len(members):
                raise failures[0][1]
            self._weights.delivery, self._weights.version = delivery, version
        finally:
            self._weights.installing = None
        for member, error in failures:
            if isinstance(error, EngineRefused | WrongVersion):
                member.outdate(str(error))
            else:
                await member.lose(str(error))

    async def _deliver(
        self, delivery: Delivery, members: Sequence[Member], version: int, *, flush_cache: bool
    ) -> Failures:
        """Deliver, then have each engine confirm; those that failed either."""
        outcomes = await delivery.deliver(
            [member.client for member in members], flush_cache=flush_cache
        )
        pairs = list(zip(members, outcomes, strict=True))
        failures = [(member, error) for member, error in pairs if error is not None]
        served = [member for member, error in pairs if error is None]
        return failures + await _failures(served, lambda member: member.confirm(version))

    async def checksums(self) -> dict[str, WeightSums]:
        """Checksums of the weights by engine, of the engines that are ready."""
        members = [member for member in self._members if member.health.phase is Phase.READY]
        sums = await asyncio.gather(*(member.client.weights.sums() for member in members))
        return {member.client.url: one for member, one in zip(members, sums, strict=True)}

    async def _on_all(self, what: str, call: Callable[[Member], Awaitable[None]]) -> None:
        """A call to every engine that is up; one that fails is taken out.

        Raises:
            EngineError: it failed on every engine; then none is taken out.
        """
        members = [member for member in self._members if member.health.is_up]
        failures = await _failures(members, call)
        if members and len(failures) == len(members):
            raise failures[0][1]
        for member, error in failures:
            logger.warning("could not %s engine %s: %s", what, member.client.url, error)
            await member.lose(f"it did not {what}: {error}")

    def _set_gate(self) -> None:
        if self._weights.is_generating:
            self._admission.open()
        else:
            self._admission.close()


async def _failures(
    members: Sequence[Member], call: Callable[[Member], Awaitable[None]]
) -> Failures:
    """Call every member at once; those whose engine failed. Other errors are raised."""
    outcomes = await asyncio.gather(*(call(member) for member in members), return_exceptions=True)
    failures: Failures = []
    for member, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, EngineCallError):
            failures.append((member, outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
    return failures
