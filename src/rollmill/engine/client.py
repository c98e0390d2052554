"""A typed client of one engine's native HTTP API (SGLang's, which the embedded engine serves too).

Every engine is reached through this class and no other way. Invariants: a generate call that ends
without an answer (cancelled, timed out, tried again) has its request aborted on the engine; no
task outlives `close()`.

Request ids. SGLang aborts by *prefix* of the request id, so aborting "5" would abort "51" as well.
The client therefore ends every id on the wire with a mark, which makes ids prefix-free. The number
of a further try stands before the mark: aborting the try before ("5;") must not abort it ("5~1;").

Streams. With `engine.stream_interval` answers come in pieces, so that what an engine has written is
known when it dies; see `engine/stream.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
import numpy.typing as npt

from rollmill.config.engine import EngineConfig
from rollmill.engine.errors import (
    EngineCallError,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    MalformedAnswer,
)
from rollmill.engine.http import HttpChannel, encode
from rollmill.engine.parse import parse_generate, parse_score
from rollmill.engine.stream import StreamedAnswer
from rollmill.engine.turns import Turns
from rollmill.engine.types import GenerateResult
from rollmill.engine.weight_calls import CONTROL_TIMEOUT_S, UPDATE_TIMEOUT_S, WeightCalls
from rollmill.sample import FloatArray, int_array

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]

ROUTING_HEADER = "x-smg-routing-key"
"""The SGLang router keeps requests with one key on one engine."""
END_OF_RID = ";"
BEFORE_TRY = "~"
ABORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0


class ModelInfo(msgspec.Struct, frozen=True):
    """What an engine says about its model."""

    model_path: str
    weight_version: str
    tokenizer_path: str | None = None


class EngineLoad(msgspec.Struct, frozen=True):
    """How busy an engine is (one data-parallel rank of it)."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0


_Answer = TypeVar("_Answer")


class _Loads(msgspec.Struct):
    loads: list[EngineLoad]


class EngineClient:
    """Calls to one engine.

    Args:
        url: the engine's base URL.
        config: deadlines and retries.
        session: connection pool, shared by clients and closed by its owner.
        experts_shape: (layers, top_k) for decoding routed experts; None leaves them out.
        turns: spreads the reading of answers over turns of the event loop; clients of one
            process share it.

    Attributes:
        url: the base URL.
        weights: calls that move weights otherwise than through a folder, and checksums.
    """

    def __init__(
        self,
        url: str,
        config: EngineConfig,
        session: aiohttp.ClientSession,
        *,
        experts_shape: tuple[int, int] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._http = HttpChannel(self.url, session, max_retries=config.max_retries)
        self.weights = WeightCalls(self._http)
        self._experts_shape = experts_shape
        self._turns = turns or Turns()
        self._wire_rids: dict[str, str] = {}
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_in_flight(self) -> int:
        """Generate calls without an answer yet."""
        return len(self._wire_rids)

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
        """Let the engine write an answer.

        Args:
            rid: unique among requests in flight, and among recent ones when answers are streamed
                (SGLang aborts the id of a stream once more, 2 s after its end); what `abort` is
                called with.
            input_ids: token ids of the context.
            sampling: SGLang's `sampling_params`, with `max_new_tokens`.
            session_id: routing key, for routers in front of engines.
            return_routed_experts: ask for the experts that each token used.
            oldest_version: tokens of earlier weights are an error; None takes any.
            num_before: how many of the last tokens of `input_ids` an earlier call with the same
                `sampling_seed` wrote: its random numbers go on, as if it had not been interrupted.
            streamed: where a streamed answer is put as it arrives, for a caller who wants what
                there is of it when the call fails.

        Raises:
            EngineCallError: a subclass says why there is no valid answer.
        """
        token_ids = int_array(input_ids)
        payload: dict[str, Any] = {
            "input_ids": token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if return_routed_experts:
            payload["return_routed_experts"] = True
        if num_before:
            payload["sampling_offset"] = num_before
        headers = {ROUTING_HEADER: session_id} if session_id is not None else None
        where = f"request {rid} on {self.url}"
        body: bytes | Sequence[bytes]
        if self._config.stream_interval is None:
            body = await self._generate_call(rid, payload, headers)
        else:
            streamed = streamed or StreamedAnswer(where)
            body = await self._stream(rid, payload, headers, streamed)
        await self._turns.take()
        return parse_generate(
            body,
            where=where,
            max_new_tokens=int(sampling["max_new_tokens"]),
            num_prompt_tokens=len(token_ids),
            oldest_version=oldest_version,
            experts_shape=self._experts_shape if return_routed_experts else None,
        )

    async def _stream(
        self,
        rid: str,
        payload: dict[str, Any],
        headers: Mapping[str, str] | None,
        streamed: StreamedAnswer,
    ) -> Sequence[bytes]:
        """The pieces of the whole answer, after they went through `streamed`."""
        payload["sampling_params"] = {
            **payload["sampling_params"],
            "stream_interval": self._config.stream_interval,
        }
        payload["stream"] = True
        payload["incremental_streaming_output"] = True  # SGLang reads its own flag instead
        try:
            await self._generate_call(rid, payload, headers, streamed)
        except EngineUnreachable:
            if not streamed.is_finished:
                raise
        return streamed.pieces

    async def _generate_call(
        self,
        rid: str,
        payload: dict[str, Any],
        headers: Mapping[str, str] | None,
        streamed: StreamedAnswer | None = None,
    ) -> bytes:
        if rid in self._wire_rids:
            raise ValueError(f"request id {rid!r} is in flight already")

        def body(attempt: int) -> bytes:
            """Each try has an id of its own: the engine may still be at work on the last one."""
            if attempt:
                self._abort_later(self._wire_rids[rid])
            wire_rid = f"{rid}{BEFORE_TRY}{attempt}{END_OF_RID}" if attempt else rid + END_OF_RID
            self._wire_rids[rid] = wire_rid
            if streamed is not None:
                streamed.restart()
            return encode({"rid": wire_rid, **payload})

        self._wire_rids[rid] = rid + END_OF_RID
        try:
            answer = await self._http.call(
                "POST",
                "/generate",
                body,
                timeout_s=self._config.request_timeout_s,
                headers=headers,
                is_patient=True,
                sink=None if streamed is None else streamed.feed,
            )
            if streamed is not None and not streamed.is_finished:
                raise EngineUnreachable(
                    "the engine's stream ended before its answer did",
                    where=f"request {rid} on {self.url}",
                    expected="a last piece with a finish_reason",
                    found=f"{streamed.num_tokens} tokens",
                )
            return answer
        except (asyncio.CancelledError, EngineTimeout, EngineUnreachable):
            self._abort_later(self._wire_rids[rid])
            raise
        finally:
            del self._wire_rids[rid]

    async def score(self, input_ids: npt.ArrayLike, start: int) -> FloatArray:
        """Log-probs (float32, natural log) of the given tokens from position `start` on.

        Args:
            input_ids: token ids; nothing is generated.
            start: 1 or more, as the first token has nothing before it.
        """
        token_ids = int_array(input_ids)
        if not 1 <= start <= len(token_ids):
            raise ValueError(f"start: expected 1 to {len(token_ids)}, found {start}")
        payload = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        body = await self._http.call(
            "POST",
            "/generate",
            encode(payload),
            timeout_s=self._config.request_timeout_s,
            is_patient=True,
        )
        return parse_score(body, token_ids[start:], where=f"score on {self.url}")

    async def abort(self, rid: str, *, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """Ask the engine to stop this request; its generate call then returns what there is."""
        wire_rid = self._wire_rids.get(rid, rid + END_OF_RID)
        await self.send_abort({"rid": wire_rid}, timeout_s=timeout_s)

    async def abort_all(self, *, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """Ask the engine to stop every request it has, whoever sent it."""
        await self.send_abort({"abort_all": True}, timeout_s=timeout_s)

    async def send_abort(self, payload: Mapping[str, Any], *, timeout_s: float) -> None:
        """Send a ready-made abort."""
        await self._post("/abort_request", payload, timeout_s=timeout_s, max_retries=0)

    async def pause(self, mode: PauseMode) -> None:
        """Hold generation: `abort` ends running requests, `retract` requeues them, `in_place` keeps
        them and their cache as they are. New requests are held until `resume`."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._post("/continue_generation", {})

    async def update_weights_from_disk(
        self, path: str, version: int, *, flush_cache: bool = True
    ) -> None:
        """Load the weights in folder `path` and call them `version`."""
        payload = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": flush_cache,
        }
        await self._post("/update_weights_from_disk", payload, timeout_s=UPDATE_TIMEOUT_S)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Free the named parts of device memory."""
        await self._post("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the named parts of device memory again."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)})

    async def flush_cache(self, *, wait_s: float | None = None) -> None:
        """Forget cached prefixes.

        Args:
            wait_s: wait this long until no request is left, queued ones included; None flushes
                at once, which needs an engine that is idle or paused with `retract`.
        """
        path = "/flush_cache" if wait_s is None else f"/flush_cache?timeout={wait_s:g}"
        await self._http.call("POST", path, timeout_s=CONTROL_TIMEOUT_S + (wait_s or 0.0))

    async def health(self, *, timeout_s: float) -> None:
        """Return when the engine answers and can generate.

        Raises:
            EngineCallError: it cannot (yet).
        """
        await self._http.call("GET", "/health", timeout_s=timeout_s, max_retries=0)

    async def ping(self, *, timeout_s: float) -> None:
        """Return when the engine's server answers anything, paused or not.

        Raises:
            EngineCallError: it does not.
        """
        try:
            await self._http.call("GET", "/ping", timeout_s=timeout_s, max_retries=0)
        except (EngineRefused, EngineFailed):
            return

    async def model_info(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> ModelInfo:
        """The model that is served, and the version of its weights."""
        return await self._get("/model_info", ModelInfo, timeout_s=timeout_s)

    async def loads(self) -> list[EngineLoad]:
        """How busy the engine is, by data-parallel rank."""
        return (await self._get("/v1/loads", _Loads)).loads

    async def close(self) -> None:
        """Wait for the last aborts to be sent, but not for long."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _abort_later(self, wire_rid: str) -> None:
        """Abort a request nobody waits for any more; `close` waits for the abort."""
        self._in_background(self._abort_forgotten(wire_rid))

    async def _abort_forgotten(self, wire_rid: str) -> None:
        try:
            await self.send_abort({"rid": wire_rid}, timeout_s=ABORT_TIMEOUT_S)
        except EngineCallError as error:  # the caller is gone; the engine's health is watched
            logger.debug("abort of %s on %s did not arrive: %s", wire_rid, self.url, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _post(
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        max_retries: int | None = None,
    ) -> bytes:
        return await self._http.call(
            "POST", path, encode(payload), timeout_s=timeout_s, max_retries=max_retries
        )

    async def _get(
        self, path: str, kind: type[_Answer], *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> _Answer:
        body = await self._http.call("GET", path, timeout_s=timeout_s)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise MalformedAnswer(
                "the engine's answer has another shape than expected",
                where=f"GET {self.url}{path}",
                found=f"{error}; the answer begins {body[:80]!r}",
            ) from error
