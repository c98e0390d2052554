"""All engines of a run as one: requests go to any of them, control calls to all of them.

What the pool promises to its callers:

- at most `max_concurrent_requests` requests are in flight, counted singly;
- a request whose engine dies is sent to another engine, and its caller never notices; with
  `stream_interval` the other one goes on from the tokens that had arrived;
- no token comes from weights older than those current when its request was sent, nor from any
  that the run did not hand out;
- every wait has a deadline, and nothing the pool started outlives `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy.typing as npt

from rollmill.config.engine import EngineConfig
from rollmill.engine.admission import Admission
from rollmill.engine.client import EngineClient, MemoryTag
from rollmill.engine.control import Control
from rollmill.engine.delivery import Delivery, FolderDelivery
from rollmill.engine.dispatch import AbortReport, Dispatcher, Lane, Request
from rollmill.engine.errors import EngineLost
from rollmill.engine.experts_shape import experts_shape_of
from rollmill.engine.health import Phase
from rollmill.engine.http import new_session
from rollmill.engine.launch import EMBEDDED_ENGINE, EmbeddedProcess
from rollmill.engine.member import EngineProcess, Member
from rollmill.engine.open_files import make_room
from rollmill.engine.router import SGLANG_ROUTER, RouterLane, RouterProcess
from rollmill.engine.turns import Turns
from rollmill.engine.types import GenerateResult, HoldMode
from rollmill.engine.weight_calls import WeightSums
from rollmill.engine.weight_state import WeightState
from rollmill.errors import first_error
from rollmill.sample import FloatArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The pool at one moment; the last three counters are since its start."""

    num_engines: int
    num_ready: int
    num_in_flight: int
    num_waiting: int
    outstanding_tokens: int
    num_engine_deaths: int
    num_redispatched: int
    num_kept_tokens: int


class EnginePool:
    """The engines of a run. Use as an async context manager, or call `start` and `close`.

    Args:
        config: engines, limits, timeouts.
        model_path: folder of the first weights, for engines started here.
        run_dir: engines' logs go to `logs/` there.
        tokenizer_path: tokenizer folder, when it is not the model's.
        context_length: most tokens of context and answer; None is the model's own limit.
        first_version: version of the first weights.
        program: what to start as an engine (tests put a scripted engine here).
        router_program: what to start as the SGLang router.
        first_index: number of the first engine, for its log and port, when there are several pools.
        middlewares: of aiohttp, around every call to an engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_path: str,
        run_dir: Path,
        tokenizer_path: str | None = None,
        context_length: int | None = None,
        first_version: int = 0,
        program: Sequence[str] = EMBEDDED_ENGINE,
        router_program: Sequence[str] = SGLANG_ROUTER,
        first_index: int = 0,
        middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._experts_shape = experts_shape_of(model_path)
        self._tokenizer_path = tokenizer_path
        self._context_length = context_length
        self._run_dir = run_dir
        self._first_version = first_version
        self._program = program
        self._router_program = router_program
        self._first_index = first_index
        self._middlewares = middlewares
        self._weights = WeightState(version=None if config.urls else first_version)
        self._turns = Turns()
        self._admission = Admission(config.max_concurrent_requests)
        self._members: list[Member] = []
        self._router: RouterLane | None = None
        self._lanes: list[Lane] = []
        self._dispatcher = Dispatcher(self._lanes, self._weights, self._admission, config)
        self._control = Control(self._members, self._weights, self._admission)
        self._session: aiohttp.ClientSession | None = None
        self._watches: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------

    async def __aenter__(self) -> EnginePool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start or reach every engine; returns when all are ready.

        Raises:
            EngineError: an engine did not come up; nothing is left running.
            ConfigError: this process may not open so many connections.
        """
        limit = self._config.max_concurrent_requests
        make_room(limit, where="engine.max_concurrent_requests")
        self._session = new_session(self._middlewares)
        try:
            self._members.extend(self._make_members(self._session))
            async with asyncio.TaskGroup() as group:
                for member in self._members:
                    group.create_task(member.bring_up())
            self._lanes.extend(await self._make_lanes(self._session))
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise first_error(error) from None
            raise
        self._watches = [asyncio.create_task(member.watch()) for member in self._members]
        if self._router is not None:
            self._watches.append(asyncio.create_task(self._router.watch()))
        for watch in self._watches:
            watch.add_done_callback(_report_crash)

    async def close(self) -> None:
        """Stop watching, end the requests in flight, stop the engines that were started here."""
        self._dispatcher.close()
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        if self._router is not None:
            await self._router.close()
        await asyncio.gather(*(member.close() for member in self._members), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _make_members(self, session: aiohttp.ClientSession) -> list[Member]:
        if self._config.urls:
            return [self._member(url, session, None) for url in self._config.urls]
        processes = [
            EmbeddedProcess(
                self._config,
                session,
                index=self._first_index + index,
                model_path=self._model_path,
                tokenizer_path=self._tokenizer_path,
                context_length=self._context_length,
                run_dir=self._run_dir,
                weight_version=self._first_version,
                program=self._program,
            )
            for index in range(self._config.num_engines)
        ]
        return [self._member(process.url, session, process) for process in processes]

    def _member(
        self, url: str, session: aiohttp.ClientSession, process: EngineProcess | None
    ) -> Member:
        client = EngineClient(
            url, self._config, session, experts_shape=self._experts_shape, turns=self._turns
        )
        return Member(client, process, self._config, self._weights, self._on_change)

    async def _make_lanes(self, session: aiohttp.ClientSession) -> Sequence[Lane]:
        """The engines themselves, or the router in front of them."""
        if self._config.router == "none":
            return self._members
        process = RouterProcess(
            self._config, session, run_dir=self._run_dir, program=self._router_program
        )
        self._router = RouterLane(
            process, self._config, session, self._members, self._dispatcher.notify
        )
        await self._router.start()
        return [self._router]

    def _on_change(self) -> None:
        """An engine's phase changed."""
        if self._router is not None:
            self._router.notify()
        self._dispatcher.notify()

    # -- what is so --------------------------------------------------------------------------

    @property
    def clients(self) -> list[EngineClient]:
        """One client per engine, for calls that the pool has no word for."""
        return [member.client for member in self._members]

    @property
    def ready_clients(self) -> list[EngineClient]:
        """Those of the engines that take requests now."""
        return [m.client for m in self._members if m.health.phase is Phase.READY]

    @property
    def expected_version(self) -> int | None:
        """The weight version that engines serve; None when they were attached to and nobody has
        given them numbered weights yet."""
        return self._weights.version

    @property
    def pids(self) -> list[int | None]:
        """Process id of each engine; None for one that does not run now or is not ours."""
        return [member.pid for member in self._members]

    def describe(self) -> str:
        """How each engine is, for messages."""
        return "; ".join(member.describe() for member in self._members) or "no engines"

    def engine_of(self, rid: str) -> str | None:
        """URL of the engine (or router) that a request is at; None when it waits for one."""
        for lane in self._lanes:
            if lane.flights.of(rid):
                return lane.client.url
        return None

    def stats(self) -> PoolStats:
        """The pool now."""
        return PoolStats(
            num_engines=len(self._members),
            num_ready=sum(member.health.takes_requests for member in self._members),
            num_in_flight=self._admission.num_inside,
            num_waiting=self._admission.num_waiting,
            outstanding_tokens=sum(lane.flights.load for lane in self._lanes),
            num_engine_deaths=sum(member.health.num_deaths for member in self._members),
            num_redispatched=self._dispatcher.num_redispatched,
            num_kept_tokens=self._dispatcher.num_kept_tokens,
        )

    # -- requests ----------------------------------------------------------------------------

    async def generate(
        self,
        rid: str,
        input_ids: npt.ArrayLike,
        sampling: Mapping[str, Any],
        *,
        session_id: str | None = None,
        return_routed_experts: bool = False,
    ) -> GenerateResult:
        """Let an engine write an answer.

        A request that `abort_all` meets before it reached an engine returns an empty aborted
        result; one that it meets on an engine returns what was written.

        Args:
            rid: unique among requests in flight.
            input_ids: token ids of the context.
            sampling: SGLang's `sampling_params`, with `max_new_tokens`.
            session_id: requests with one id go to one engine while it is not overloaded.
            return_routed_experts: ask for the experts that each token used, also when the config
                does not.

        Raises:
            EngineCallError: no engine could answer; the subclass says why.
        """
        wants_experts = return_routed_experts or self._config.return_routed_experts
        request = Request(rid, input_ids, sampling, session_id, wants_experts)
        return await self._dispatcher.generate(request)

    async def score(
        self,
        rid: str,
        input_ids: npt.ArrayLike,
        start: int,
        *,
        session_id: str | None = None,
    ) -> FloatArray:
        """Log-probs (float32, natural log, at temperature 1) of given tokens; nothing is written.

        The input must be shorter than the engine's context. Weight versions are not checked.

        Args:
            rid: unique among requests in flight.
            input_ids: token ids, context included.
            start: the first position that is scored, 1 or more.
            session_id: as for `generate`.

        Raises:
            EngineCallError: no engine could answer, or the request was aborted.
        """
        sampling = {"max_new_tokens": 0}
        request = Request(rid, input_ids, sampling, session_id, False, score_from=start)
        result = await self._dispatcher.generate(request)
        if result.is_aborted:
            raise EngineLost("the request was aborted before an engine saw it", where=rid)
        return result.log_probs

    async def abort_all(self, deadline_s: float) -> AbortReport:
        """Stop every request that was submitted before this call, waiting ones included.

        Engines are told again and again until they have answered; what they have not answered by
        the deadline is given up (those calls raise `EngineTimeout`). Never raises for an engine.
        """
        return await self._dispatcher.abort_all(deadline_s)

    async def abort(self, rid: str, deadline_s: float) -> AbortReport:
        """Stop the request `rid` as `abort_all` would; all others go on, whatever their ids."""
        return await self._dispatcher.abort_all(deadline_s, rid)

    # -- every engine at once ------------------------------------------------------------------

    async def pause_all(self, mode: HoldMode) -> None:
        """Hold generation on every engine; new requests wait here until `resume_all`.

        Running requests are ended (`abort`), queued again (`retract`), kept as they are
        (`in_place`) or waited for (`drain`). An engine that cannot be paused while others can is
        started again.
        """
        await self._control.pause(mode)

    async def resume_all(self) -> None:
        """Go on. May be called at any time, also after a failed `pause_all`."""
        await self._control.resume()

    async def flush_cache(self) -> None:
        """Have every engine forget its cached prefixes."""
        await self._control.flush_cache()

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Free device memory on every engine; new requests wait until all of it is resumed."""
        await self._control.release_memory(tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory again."""
        await self._control.resume_memory(tags)

    async def install(self, delivery: Delivery, version: int, *, flush_cache: bool = True) -> None:
        """Give every engine the delivered weights and have each confirm `version`.

        The delivery must be able to renew engines until the next one: an engine that is not ready
        now, or that fails while another succeeds, is renewed before it gets requests (again).

        Raises:
            EngineError: no engine took the weights. The old version stays the expected one.
        """
        self._dispatcher.check_hope()
        await self._control.install(delivery, version, flush_cache=flush_cache)

    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        """Give every engine the weights in folder `path`, which must stay there until the next
        update. See `install`."""
        await self.install(FolderDelivery(path, version), version, flush_cache=flush_cache)

    async def checksums(self) -> dict[str, WeightSums]:
        """Checksums of the weights that each ready engine serves, by its URL."""
        return await self._control.checksums()


def _report_crash(watch: asyncio.Task[None]) -> None:
    """A watch ends by being cancelled or when its engine is given up; else it has a bug."""
    if not watch.cancelled() and watch.exception() is not None:
        logger.error("watching an engine failed", exc_info=watch.exception())
