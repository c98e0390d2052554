"""One engine of the pool: its health, its weights, its process.

A member has one watch task that takes the engine through its life (`engine/health.py`). Invariants:
when the engine dies, every request in flight on it ends with `EngineLost` at once, so that the
pool can send it elsewhere; and the engine is ready only after it has confirmed the current weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rollmill.config.engine import EngineConfig
from rollmill.engine.client import EngineClient, MemoryTag
from rollmill.engine.errors import (
    EngineCallError,
    EngineLost,
    EngineTimeout,
    WrongVersion,
)
from rollmill.engine.flights import Flights
from rollmill.engine.health import EngineHealth, Phase
from rollmill.engine.weight_state import WeightState

logger = logging.getLogger(__name__)

RETRY_PROBE_S = 1.0
"""Longest time between two health checks while one has just failed or the engine is starting."""
SETTLE_S = 0.1
"""Wait before a stale engine is given weights again, while new ones are on their way, and before
it is looked again whether a dead one has room to start."""


class EngineProcess(Protocol):
    """A process that serves an engine; `EmbeddedProcess` is one."""

    @property
    def url(self) -> str:
        """Where the engine listens."""

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""

    async def start(self) -> None:
        """Start and return when healthy."""

    async def stop(self) -> None:
        """End gently."""

    async def kill(self) -> None:
        """End at once."""

    async def wait_exit(self) -> str:
        """Return how the process ended, when it has."""


class Member:
    """One engine of the pool.

    Args:
        client: the engine's client.
        process: the engine's process when it is ours; None for an attached engine.
        config: timeouts and strikes.
        weights: the weights it should serve.
        on_change: called after every change of phase.
    """

    def __init__(
        self,
        client: EngineClient,
        process: EngineProcess | None,
        config: EngineConfig,
        weights: WeightState,
        on_change: Callable[[], None],
    ) -> None:
        self.client = client
        self.flights = Flights(client, is_shared=process is None)
        self.health = EngineHealth(
            max_strikes=config.health_strikes,
            max_restarts=config.max_restarts if process is not None else None,
        )
        self._process = process
        self._config = config
        self._weights = weights
        self._on_change = on_change
        self._poke = asyncio.Event()
        self._released: set[MemoryTag] = set()

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go to this engine."""
        return self.health.takes_requests

    @property
    def pid(self) -> int | None:
        """Process id of an engine of ours while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_given_up(self) -> bool:
        """Whether this engine will never take requests again."""
        return self.health.phase is Phase.GIVEN_UP

    def describe(self) -> str:
        """How the engine is, for messages."""
        return f"{self.client.url} is {self.health.phase} ({self.health.reason})"

    async def bring_up(self) -> None:
        """From dead to ready, once, for the start of the run.

        Raises:
            EngineCallError: it did not come up; nothing of it is left running.
        """
        self.health.starting()
        try:
            async with asyncio.timeout(None if self._process else self._config.start_timeout_s):
                await self._start()
                await self._refresh()
        except TimeoutError:
            raise EngineTimeout(
                "the engine does not answer",
                where=f"engine.urls: {self.client.url}",
                expected="an answer to GET /health within engine.start_timeout_s = "
                f"{self._config.start_timeout_s:g} s",
                fix="start the engine first, or correct the address",
            ) from None

    async def watch(self) -> None:
        """Take the engine through its life until it is given up. Run as a task; never raises
        for anything the engine does."""
        while self.health.phase is not Phase.GIVEN_UP:
            phase = self.health.phase
            try:
                await self._live()
            except EngineCallError as error:
                await self._trouble(error)
            if self.health.phase is not phase:
                self._announce()

    async def close(self) -> None:
        """End what is ours; requests in flight end with `EngineLost`."""
        self.flights.cut(self._lost("the pool was closed"))
        if self._process is not None:
            await self._process.stop()
        await self.client.close()

    def doubt(self, reason: str) -> None:
        """No new requests until a health check, made at once, succeeds."""
        self.health.doubted(reason)
        self._poke.set()
        self._on_change()

    def outdate(self, reason: str) -> None:
        """The engine serves other weights than it should: renew them before it gets work."""
        self.health.outdated(reason)
        self._poke.set()
        self._on_change()

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Free the named parts of the engine's memory."""
        await self.client.release_memory(tags)
        self._released.update(tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the named parts again, as far as they were freed: an engine that was started
        meanwhile has them, and asking it for them would be an error (SGLang dies of it)."""
        mine = [tag for tag in tags if tag in self._released]
        if mine:
            await self.client.resume_memory(mine)
            self._released.difference_update(mine)

    async def lose(self, reason: str) -> None:
        """The engine cannot be trusted any more: end it; the watch task starts it again."""
        self.health.lost(asyncio.get_running_loop().time(), reason)
        self.flights.cut(self._lost(reason))
        self._poke.set()
        self._on_change()
        if self._process is not None:
            await self._process.kill()

    async def _live(self) -> None:
        """One step of the engine's life, according to its phase."""
        loop = asyncio.get_running_loop()
        match self.health.phase:
            case Phase.DEAD:
                await asyncio.sleep(self.health.restart_delay_s(loop.time()))
                if self._process is None:
                    self.health.starting()
                elif "weights" in self._weights.released:
                    await asyncio.sleep(SETTLE_S)  # the trainer has the memory it would take
                else:
                    self.health.starting()
                    self._released.clear()
            case Phase.STARTING:
                await self._start()
            case Phase.STALE:
                await self._refresh()
            case _:
                await self._probe()

    async def _start(self) -> None:
        """Until the engine answers. An attached engine is waited for without end."""
        if self._process is not None:
            await self._process.start()
        else:
            await self._wait_for_answer()
        self.health.answered()

    async def _wait_for_answer(self) -> None:
        while True:
            try:
                await self.client.health(timeout_s=self._config.health_timeout_s)
            except EngineCallError:  # not yet
                await asyncio.sleep(min(RETRY_PROBE_S, self._config.health_interval_s))
            else:
                return

    async def _refresh(self) -> None:
        """Give the engine the current weights and have it confirm them."""
        delivery, version = self._weights.delivery, self._weights.version
        if delivery is not None and version is not None:
            await delivery.renew(self.client)
            await self.confirm(version)
            if not self._weights.is_paused:
                await self.client.resume()  # it may have been paused when we lost it
        elif version is not None:
            await self.confirm(version)
        is_still_current = delivery is self._weights.delivery and version == self._weights.version
        if is_still_current and self._weights.installing is None:
            self.health.answered()
            self.health.current()
        else:
            await asyncio.sleep(SETTLE_S)

    async def confirm(self, version: int) -> None:
        """Raise `WrongVersion` unless the engine says that it serves `version`."""
        found = (await self.client.model_info()).weight_version
        if found != str(version):
            raise WrongVersion(
                "the engine does not serve the weights it was given",
                where=self.client.url,
                expected=f"weight version {version}",
                found=repr(found),
            )

    async def _probe(self) -> None:
        """Wait for the next health check, or for a reason to hurry; then check."""
        interval = self._config.health_interval_s
        if not self.health.takes_requests:
            interval = min(interval, RETRY_PROBE_S)
        await self._wait(interval)
        if self.health.phase is not Phase.READY:
            return
        if not self._weights.is_generating:  # it cannot prove its health, only that it is there
            await self.client.ping(timeout_s=self._config.health_timeout_s)
            self.health.is_there()
            return
        await self.client.health(timeout_s=self._config.health_timeout_s)
        was_taking = self.health.takes_requests
        self.health.answered()
        if not was_taking:
            self._announce()
        await self._check_version()

    async def _check_version(self) -> None:
        """An attached engine that was started anew behind our back has other weights."""
        version = self._weights.version
        found = (
            await self.client.model_info(timeout_s=self._config.health_timeout_s)
        ).weight_version
        is_settled = self._weights.installing is None and version == self._weights.version
        if version is not None and is_settled and found != str(version):
            self.outdate(f"it serves weights {found!r}, not {version}")

    async def _wait(self, timeout_s: float) -> None:
        """Return after `timeout_s`, or when poked; raise `EngineLost` when the process ends."""
        poked = asyncio.create_task(self._poke.wait())
        tasks: set[asyncio.Task[Any]] = {poked}
        exited: asyncio.Task[str] | None = None
        if self._process is not None:
            exited = asyncio.create_task(self._process.wait_exit())
            tasks.add(exited)
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if exited is not None and exited.done() and self.health.is_up:
                raise self._lost(exited.result())
        finally:
            self._poke.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _trouble(self, error: EngineCallError) -> None:
        """What an error means for the engine's health."""
        now = asyncio.get_running_loop().time()
        reason = str(error)
        if isinstance(error, EngineLost) or self.health.phase is Phase.STARTING:
            self.health.lost(now, reason)
        else:
            self.health.silent(now, reason)
            self._on_change()
        logger.warning("engine %s: %s (%s)", self.client.url, reason, self.health.phase)
        if self.health.phase in (Phase.DEAD, Phase.GIVEN_UP):
            self.flights.cut(self._lost(reason))
            if self._process is not None:
                await self._process.kill()
        elif self.health.phase is Phase.STALE:
            await asyncio.sleep(min(RETRY_PROBE_S, self._config.health_interval_s))

    def _announce(self) -> None:
        logger.info("engine %s is %s", self.client.url, self.health.phase)
        self._on_change()

    def _lost(self, reason: str) -> EngineLost:
        return EngineLost(
            "the engine was lost with the request in flight",
            where=self.client.url,
            found=reason,
        )
