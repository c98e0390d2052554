"""How a scripted engine streams an answer: in pieces, cut as one kind of engine cuts them."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web
from engine_script import Fault, FaultKind, Pieces, Script


class Stream:
    """One streamed answer; sends each piece once it is due."""

    def __init__(self, request: web.Request, script: Script, body: dict[str, Any]) -> None:
        self._request = request
        self._script = script
        self._kind = Pieces(script.pieces)
        if self._kind is Pieces.EMBEDDED and not body.get("incremental_streaming_output"):
            self._kind = Pieces.CUMULATIVE
        self._interval = body["sampling_params"].get("stream_interval") or 1
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._num_sent = 0

    async def start(self) -> None:
        await self._response.prepare(self._request)

    async def send(self, answer: dict[str, Any], num_tokens: int) -> None:
        """The pieces that are due of an answer's first `num_tokens` tokens."""
        for count in range(self._num_sent + 1, num_tokens + 1):
            if (count - 1) % self._interval == 0:
                await self._write(self._piece(answer, count, is_last=False))

    async def end(self, answer: dict[str, Any], fault: Fault | None) -> web.StreamResponse:
        """The last piece, or the fault that comes in its place."""
        if fault is not None and fault.kind == FaultKind.CUT:
            if self._request.transport is not None:
                self._request.transport.abort()
            return self._response
        if fault is not None and fault.kind == FaultKind.STREAM_ERROR:
            await self._write(
                {"error": {"message": f"scripted {fault.status}", "code": fault.status}}
            )
        else:
            await self._write(self._piece(answer, len(answer["output_ids"]), is_last=True))
        await self._response.write(b"data: [DONE]\n\n")
        return self._response

    def _piece(self, answer: dict[str, Any], count: int, *, is_last: bool) -> dict[str, Any]:
        start = 0 if self._kind is Pieces.CUMULATIVE else self._num_sent
        self._num_sent = count
        meta = dict(answer["meta_info"], completion_tokens=count)
        spans = [s for s in meta.pop("weight_versions") if s["start"] < count]
        if spans:
            meta["weight_version"] = spans[-1]["version"]
        if is_last or self._kind is Pieces.EMBEDDED:
            meta["weight_versions"] = [dict(s, end=min(s["end"], count)) for s in spans]
        if not is_last:
            meta["finish_reason"] = None
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"] = meta["output_token_logprobs"][start:count]
        ids = answer["output_ids"][start:count]
        text = answer["text"] if is_last and not start else self._script.render(ids)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def _write(self, event: dict[str, Any]) -> None:
        await self._response.write(b"data: " + orjson.dumps(event) + b"\n\n")
