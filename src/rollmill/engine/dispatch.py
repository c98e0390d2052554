"""Getting requests answered by some engine, whatever happens to single ones.

Invariants: a request that `abort_all` finds is never sent (again); a request whose engine died is
sent to another one, but not for ever, since it may be what kills them; a result is handed out only
after its weight versions were checked. With `engine.stream_interval`, tokens that came before the
engine died are part of the answer, and the other one goes on from them (`engine/resume.py`).

Policy: tokens of a dead engine that do not pass the checks are dropped, with a warning, and the
request starts afresh.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from rollmill.config.engine import EngineConfig
from rollmill.engine.admission import Admission
from rollmill.engine.balance import Balancer
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import (
    EngineLost,
    EngineTimeout,
    EngineUnreachable,
    MalformedAnswer,
    WrongVersion,
)
from rollmill.engine.flights import Flights
from rollmill.engine.resume import Unfinished
from rollmill.engine.stream import StreamedAnswer
from rollmill.engine.types import FinishReason, GenerateResult
from rollmill.engine.weight_state import WeightState
from rollmill.sample import IntArray, int_array

logger = logging.getLogger(__name__)

BEFORE_RESEND = "|"
"""Stands in a request's id before the number of times that it was sent again: what an engine is
told about one sending must not be taken for another."""

MAX_DEATHS_PER_REQUEST = 3
"""A request whose engine died this often is failed. Two may be bad luck: the second engine was dead
already when the request came, and nobody had noticed yet."""


@dataclass(frozen=True, slots=True)
class AbortReport:
    """What `abort_all` did: requests stopped, and those given up because nobody answered."""

    num_aborted: int
    num_unanswered: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request to the pool; fields as of `EnginePool.generate`, and `EnginePool.score`."""

    rid: str
    input_ids: npt.ArrayLike
    sampling: Mapping[str, Any]
    session_id: str | None
    return_routed_experts: bool
    score_from: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Sending:
    """One try of a request on one engine, before which weights `oldest` were current."""

    rid: str
    lane: Lane
    oldest: int | None
    streamed: StreamedAnswer | None


class Lane(Protocol):
    """A way to an answer: one engine, or a router in front of several."""

    client: EngineClient
    flights: Flights

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go this way."""

    @property
    def is_given_up(self) -> bool:
        """Whether this way is closed for ever."""

    def describe(self) -> str:
        """How it is, for messages."""

    def doubt(self, reason: str) -> None:
        """A request got no answer here: make sure of it before it gets new ones."""

    def outdate(self, reason: str) -> None:
        """Tokens of other weights than expected came from here."""


class Dispatcher:
    """Sends requests to engines.

    Args:
        lanes: the engines, or the router in front of them.
        weights: what they should serve.
        admission: the gate that requests pass first.
        config: deadlines and retries.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        weights: WeightState,
        admission: Admission,
        config: EngineConfig,
    ) -> None:
        self.num_redispatched = 0
        self.num_kept_tokens = 0
        self._lanes = lanes
        self._weights = weights
        self._admission = admission
        self._config = config
        self._balancer = Balancer()
        self._changed = asyncio.Event()
        self._open: set[Request] = set()
        self._is_closed = False

    async def generate(self, request: Request) -> GenerateResult:
        """The answer of some engine; an empty aborted one when aborted before an engine saw it.

        Raises:
            EngineCallError: no engine could answer.
        """
        self._open.add(request)
        try:
            if not await self._admission.enter(request.rid):
                return GenerateResult.aborted_before_start()
            try:
                return await self._until_answered(request)
            finally:
                self._admission.leave()
        finally:
            self._open.discard(request)

    async def abort_all(self, deadline_s: float, rid: str | None = None) -> AbortReport:
        """Stop every request submitted before this call, or only `rid`; what does not answer by
        the deadline is given up."""
        self._open = {r for r in self._open if rid not in (None, r.rid)}
        num_waiting = self._admission.abort_waiting(rid)
        num_flying = sum(len(lane.flights.of(rid)) for lane in self._lanes)
        self.notify()
        unanswered = await asyncio.gather(
            *(lane.flights.abort_until_idle(deadline_s, rid) for lane in self._lanes)
        )
        for lane, number in zip(self._lanes, unanswered, strict=True):
            if number:
                lane.doubt("it did not answer an abort")
        return AbortReport(num_waiting + num_flying - sum(unanswered), sum(unanswered))

    def notify(self) -> None:
        """An engine's phase changed: whoever waits for an engine looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Send away who waits; requests that lose their engine from now on are not sent again."""
        self._is_closed = True
        self._admission.abort_waiting()
        self.notify()

    def check_hope(self) -> None:
        """Raise `EngineLost` when every engine has been given up."""
        if all(lane.is_given_up for lane in self._lanes):
            raise EngineLost(
                "no engine is left",
                expected="at least one engine that starts and stays up",
                found=self._phases(),
                fix="see the engines' logs in the run's folder",
            )

    async def _until_answered(self, request: Request) -> GenerateResult:
        num_tries = num_deaths = 0
        work = Unfinished(int_array(request.input_ids), request.sampling)
        while True:
            lane = await self._pick(request, work.cost)
            if lane is None:
                return work.written
            sending = self._sending(request, lane, num_tries)
            try:
                return work.finish(await self._send(sending, request, work))
            except (EngineLost, EngineUnreachable) as error:
                num_tries += 1
                if isinstance(error, EngineLost):
                    num_deaths += 1
                else:
                    lane.doubt(str(error))
                is_last = num_tries > self._config.max_retries
                if self._is_closed or is_last or num_deaths >= MAX_DEATHS_PER_REQUEST:
                    raise
                self.num_redispatched += 1
                self._keep(sending, work)
                if not work.num_left:
                    return work.finish_at_limit()
            except WrongVersion as error:
                lane.outdate(str(error))
                raise

    def _sending(self, request: Request, lane: Lane, num_before: int) -> _Sending:
        rid = f"{request.rid}{BEFORE_RESEND}{num_before}" if num_before else request.rid
        is_streamed = self._config.stream_interval is not None and request.score_from is None
        streamed = StreamedAnswer(_where(rid, lane)) if is_streamed else None
        return _Sending(rid, lane, self._weights.version, streamed)

    async def _send(self, sending: _Sending, request: Request, work: Unfinished) -> GenerateResult:
        """What one engine writes to go on from `work`."""
        lane, token_ids = sending.lane, work.context()
        if request.score_from is not None:
            call = _scored(lane.client, token_ids, request.score_from)
        else:
            call = lane.client.generate(
                sending.rid,
                token_ids,
                work.sampling_left(),
                session_id=request.session_id,
                return_routed_experts=request.return_routed_experts,
                oldest_version=sending.oldest,
                num_before=work.num_before,
                streamed=sending.streamed,
            )
        carried = lane.flights.carry(sending.rid, work.cost, call, request=request.rid)
        result = await carried
        self._weights.check(result, sending.oldest, where=_where(sending.rid, lane))
        return result

    def _keep(self, sending: _Sending, work: Unfinished) -> None:
        """Add what a lost engine has written to `work`, if it was streamed and may be kept."""
        if sending.streamed is None or not work.can_go_on:
            return
        where = _where(sending.rid, sending.lane)
        try:
            part = sending.streamed.kept(
                max_new_tokens=work.num_left, oldest_version=sending.oldest
            )
            if part is None:
                return
            self._weights.check(part, sending.oldest, where=where)
        except (MalformedAnswer, WrongVersion) as error:
            logger.warning("tokens of an engine that was lost are dropped: %s", error)
            return
        work.keep(part)
        self.num_kept_tokens += part.num_tokens

    async def _pick(self, request: Request, cost: int) -> Lane | None:
        """The engine for this request, waited for; None when the request was aborted meanwhile."""
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                while request in self._open and not self._is_closed:
                    ready = {
                        number: lane.flights.load
                        for number, lane in enumerate(self._lanes)
                        if lane.takes_requests
                    }
                    if ready:
                        chosen = self._balancer.choose(ready, request.session_id, cost)
                        return self._lanes[chosen]
                    self.check_hope()
                    await self._changed.wait()
                return None
        except TimeoutError:
            raise EngineTimeout(
                "no engine became ready for the request in time",
                where=f"request {request.rid}",
                expected=f"a ready engine within {self._config.request_timeout_s:g} s",
                found=self._phases(),
            ) from None

    def _phases(self) -> str:
        return "; ".join(lane.describe() for lane in self._lanes)


def _where(rid: str, lane: Lane) -> str:
    return f"request {rid} on {lane.client.url}"


async def _scored(client: EngineClient, token_ids: IntArray, start: int) -> GenerateResult:
    """The log-probs of given tokens, in the shape of an answer that wrote them."""
    log_probs = await client.score(token_ids, start)
    return GenerateResult(token_ids[start:], log_probs, (), FinishReason.STOP)
