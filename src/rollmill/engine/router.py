"""The SGLang router in front of the engines, when the config asks for it.

The router carries `/generate` only, so every control call still goes to each engine directly. It
knows nothing of weight versions, so an engine is registered with it only while the engine takes
requests: a restarted one is unknown to the router until it serves the current weights. And it
drops request fields that it does not know, so a request that needs one of them is refused here
rather than answered without it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy.typing as npt

from rollmill.config.engine import EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import (
    EngineCallError,
    EngineLost,
    EngineRefused,
    EngineTimeout,
    MalformedAnswer,
)
from rollmill.engine.flights import Flights
from rollmill.engine.http import HttpChannel, encode
from rollmill.engine.launch import ServerProcess
from rollmill.engine.member import Member
from rollmill.engine.process import free_port
from rollmill.engine.stream import StreamedAnswer
from rollmill.engine.types import GenerateResult
from rollmill.engine.weight_calls import CONTROL_TIMEOUT_S

logger = logging.getLogger(__name__)

LEASH = (sys.executable, "-m", "rollmill.engine.leash")
SGLANG_ROUTER = (sys.executable, "-m", "sglang_router.launch_router")
DROPPED_SAMPLING_FIELDS = frozenset(
    {
        "beam_width",
        "custom_params",
        "logit_bias",
        "spaces_between_special_tokens",
        "stop_regex",
        "stream_interval",
    }
)
"""`sampling_params` that the router (0.3.2) leaves out of what it sends on."""
POLL_S = 0.05
RETRY_S = 1.0
REGISTER_TIMEOUT_S = 60.0


class _Worker(msgspec.Struct):
    id: str
    url: str
    is_healthy: bool


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class RouterProcess(ServerProcess):
    """The router's process and its list of workers.

    Args:
        config: address, port and policy.
        session: connection pool.
        run_dir: the log goes to `logs/router.log` there.
        program: what to start; takes the router's command line.
    """

    def __init__(
        self,
        config: EngineConfig,
        session: aiohttp.ClientSession,
        *,
        run_dir: Path,
        program: Sequence[str] = SGLANG_ROUTER,
    ) -> None:
        super().__init__(
            "router",
            config,
            session,
            run_dir=run_dir,
            port=config.router_port,
            port_field="engine.router_port",
        )
        self._program = tuple(program)
        self._http = HttpChannel(self.url, session, max_retries=config.max_retries)

    def command(self) -> list[str]:
        """The command line. Health and circuit breaking are ours: the router would count a
        refused request against an engine, and trust a restarted one with old weights."""
        config = self._config
        return [
            *LEASH,
            *self._program,
            *("--host", config.host, "--port", str(self.port)),
            *("--policy", config.router_policy),
            *("--worker-startup-check-interval", "1"),
            *("--request-timeout-secs", str(int(config.request_timeout_s) + 1)),
            *("--retry-max-retries", str(config.max_retries)),
            *("--prometheus-host", config.host, "--prometheus-port", str(free_port(config.host))),
            *("--log-level", "warn", "--disable-circuit-breaker", "--disable-health-check"),
        ]

    async def set_workers(self, urls: set[str]) -> None:
        """Make the router use these engines and no others; returns when it does.

        Raises:
            EngineCallError: it does not.
        """
        known = {worker.url: worker for worker in await self._workers()}
        for url in known.keys() - urls:
            await self._call("DELETE", f"/workers/{known[url].id}")
        for url in urls - known.keys():
            await self._call("POST", "/workers", encode({"url": url}))
        found: list[_Worker] = []
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                while True:
                    found = await self._workers()
                    if {worker.url for worker in found if worker.is_healthy} == urls:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineTimeout(
                "the SGLang router did not take the engines as its workers in time",
                where=self.url,
                expected=f"healthy workers {sorted(urls)} within {REGISTER_TIMEOUT_S:g} s",
                found=", ".join(f"{w.url} (healthy: {w.is_healthy})" for w in found) or "none",
                fix=f"see its log, {self.log_path}; or set engine.router to none",
            ) from None

    async def _workers(self) -> list[_Worker]:
        body = await self._call("GET", "/workers")
        try:
            return msgspec.json.decode(body, type=_Workers).workers
        except msgspec.DecodeError as error:
            raise MalformedAnswer(
                "the router's list of workers cannot be read",
                where=f"GET {self.url}/workers",
                found=str(error),
            ) from error

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        return await self._http.call(method, path, body, timeout_s=CONTROL_TIMEOUT_S)


class RouterClient(EngineClient):
    """Generate calls through the router; aborts go to every engine behind it."""

    def __init__(
        self,
        url: str,
        config: EngineConfig,
        session: aiohttp.ClientSession,
        members: Sequence[Member],
    ) -> None:
        super().__init__(url, config, session)
        self._members = members

    async def generate(
        self,
        rid: str,
        input_ids: npt.ArrayLike,
        sampling: Mapping[str, Any],
        *,
        session_id: str | None = None,
        return_routed_experts: bool = False,
        oldest_version: int | None = None,
        num_before: int = 0,
        streamed: StreamedAnswer | None = None,
    ) -> GenerateResult:
        """As `EngineClient.generate`; refuses what the router would silently leave out."""
        dropped = sorted(DROPPED_SAMPLING_FIELDS.intersection(sampling))
        if return_routed_experts:
            dropped.append("return_routed_experts")
        if streamed is not None:
            dropped.append("stream_interval")
        if num_before:
            dropped.append("sampling_offset")
        if dropped:
            raise EngineRefused(
                "the SGLang router cannot carry this request",
                where=f"request {rid}",
                expected="only fields that the router sends on",
                found=", ".join(dropped),
                fix="set engine.router to none, or leave these out",
            )
        return await super().generate(
            rid, input_ids, sampling, session_id=session_id, oldest_version=oldest_version
        )

    async def send_abort(self, payload: Mapping[str, Any], *, timeout_s: float) -> None:
        """Send an abort to every engine that is up: the request is on one of them."""
        clients = [member.client for member in self._members if member.health.is_up]
        calls = [client.send_abort(payload, timeout_s=timeout_s) for client in clients]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, EngineCallError):
                raise outcome


class RouterLane:
    """The router as the one way that requests take.

    Args:
        process: the router.
        config: timeouts.
        session: connection pool.
        members: the engines behind it.
        on_change: called when the lane may have begun to take requests.
    """

    def __init__(
        self,
        process: RouterProcess,
        config: EngineConfig,
        session: aiohttp.ClientSession,
        members: Sequence[Member],
        on_change: Callable[[], None],
    ) -> None:
        self._on_change = on_change
        self.client: EngineClient = RouterClient(process.url, config, session, members)
        self.flights = Flights(self.client, is_shared=bool(config.urls))
        self._process = process
        self._members = members
        self._registered: set[str] = set()
        self._is_up = False
        self._changed = asyncio.Event()

    @property
    def takes_requests(self) -> bool:
        """Whether the router runs and knows an engine that takes requests."""
        return self._is_up and bool(self._registered & self._wanted())

    @property
    def is_given_up(self) -> bool:
        """Whether no engine behind the router is left."""
        return all(member.is_given_up for member in self._members)

    def describe(self) -> str:
        """How the router and its engines are."""
        engines = "; ".join(member.describe() for member in self._members)
        return f"router {self.client.url} is {'up' if self._is_up else 'down'}; {engines}"

    def doubt(self, reason: str) -> None:
        """The router tried every engine it has: make sure of all of them."""
        for member in self._members:
            member.doubt(reason)

    def outdate(self, reason: str) -> None:
        """It is unknown which engine it was: their versions are looked at again."""
        self.doubt(reason)

    def notify(self) -> None:
        """An engine's phase changed."""
        self._changed.set()

    async def start(self) -> None:
        """Start the router with the engines that take requests now."""
        await self._process.start()
        await self._register()
        self._is_up = True
        self._on_change()

    async def watch(self) -> None:
        """Keep the router running and its workers right. Run as a task."""
        while True:
            try:
                await self._step()
            except EngineCallError as error:
                logger.warning("router %s: %s", self.client.url, error)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """End the router; requests in flight end with `EngineLost`."""
        self.flights.cut(_router_lost(self.client.url, "the pool was closed"))
        await self._process.stop()
        await self.client.close()

    async def _step(self) -> None:
        if not self._is_up:
            await self.start()
        changed = asyncio.create_task(self._changed.wait())
        exited = asyncio.create_task(self._process.wait_exit())
        try:
            await asyncio.wait({changed, exited}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                self._is_up = False
                self.flights.cut(_router_lost(self.client.url, exited.result()))
                return
        finally:
            changed.cancel()
            exited.cancel()
            await asyncio.gather(changed, exited, return_exceptions=True)
        self._changed.clear()
        await self._register()

    async def _register(self) -> None:
        wanted = self._wanted()
        if wanted != self._registered or not self._is_up:
            self._registered &= wanted
            await self._process.set_workers(wanted)
            self._registered = wanted
            self._on_change()

    def _wanted(self) -> set[str]:
        return {member.client.url for member in self._members if member.takes_requests}


def _router_lost(url: str, reason: str) -> EngineLost:
    return EngineLost("the router was lost with the request in flight", where=url, found=reason)
