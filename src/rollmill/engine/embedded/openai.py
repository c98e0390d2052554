"""OpenAI-compatible completions and chat, so that any OpenAI client can talk to the policy.

Beyond OpenAI's fields, answers carry SGLang's: `matched_stop`, and the weight versions in
`metadata`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from rollmill.engine.embedded.generate import (
    DONE,
    Queues,
    event,
    failure,
    open_stream,
    progress_of,
    submitted,
    wait_for_all,
)
from rollmill.engine.embedded.openai_requests import chat_body, completion_body
from rollmill.engine.embedded.replies import field_of, json_reply, read_body
from rollmill.engine.embedded.requests import GenerateCall, parse_generate
from rollmill.engine.embedded.responses import StreamText, TextReader, version_spans
from rollmill.engine.embedded.sequence import Sequence
from rollmill.engine.embedded.state import STATE, ServerState


class Shape(Protocol):
    """How one of the two APIs lays out its choices."""

    kind: str
    chunk_kind: str

    def choice(self, sequence: Sequence, text: str, reader: TextReader) -> dict[str, Any]:
        """The fields of a finished choice."""
        ...

    def delta(
        self, sequence: Sequence, text: str, span: slice, reader: TextReader
    ) -> dict[str, Any]:
        """The fields of a streamed piece: the new text and tokens `span`."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """The fields of a first piece without text, if the API has one."""
        ...


class CompletionShape:
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def choice(self, sequence: Sequence, text: str, reader: TextReader) -> dict[str, Any]:
        """See `Shape`."""
        return self.delta(sequence, text, slice(0, len(sequence.output)), reader)

    def delta(
        self, sequence: Sequence, text: str, span: slice, reader: TextReader
    ) -> dict[str, Any]:
        """See `Shape`."""
        if not sequence.logprobs.is_wanted:
            return {"text": text, "logprobs": None}
        tokens = [reader.token(token) for token in sequence.output[span]]
        top = [
            {reader.token(t): value for value, t in pairs} for pairs in sequence.output_top[span]
        ]
        logprobs = {
            "text_offset": [-1] * len(tokens),
            "token_logprobs": sequence.output_logprobs[span],
            "tokens": tokens,
            "top_logprobs": top or [{} for _ in tokens],
        }
        return {"text": text, "logprobs": logprobs}

    def opening(self) -> dict[str, Any] | None:
        """None: completions start with text."""
        return None


class ChatShape:
    """`/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def choice(self, sequence: Sequence, text: str, reader: TextReader) -> dict[str, Any]:
        """See `Shape`."""
        message = {"role": "assistant", "content": text, "reasoning_content": None}
        span = slice(0, len(sequence.output))
        return {"message": message, "logprobs": self._logprobs(sequence, span, reader)}

    def delta(
        self, sequence: Sequence, text: str, span: slice, reader: TextReader
    ) -> dict[str, Any]:
        """See `Shape`."""
        delta = {"reasoning_content": None, "content": text}
        return {"delta": delta, "logprobs": self._logprobs(sequence, span, reader)}

    def opening(self) -> dict[str, Any] | None:
        """The piece that names the role."""
        delta = {"reasoning_content": None, "role": "assistant", "content": ""}
        return {"delta": delta, "logprobs": None}

    @staticmethod
    def _logprobs(sequence: Sequence, span: slice, reader: TextReader) -> dict[str, Any] | None:
        if not sequence.logprobs.is_wanted:
            return None

        def entry(value: float, token: int) -> dict[str, Any]:
            text = reader.token(token)
            return {"token": text, "bytes": list(text.encode()), "logprob": value}

        pairs = zip(sequence.output_logprobs[span], sequence.output[span], strict=True)
        content = [entry(value, token) for value, token in pairs]
        tops = sequence.output_top[span] or [[] for _ in content]
        for one, top in zip(content, tops, strict=True):
            one["top_logprobs"] = [entry(value, token) for value, token in top]
        return {"content": content}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request on its way through: what every piece of the answer needs."""

    state: ServerState
    call: GenerateCall
    shape: Shape
    model: str
    created: int
    with_usage: bool

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The outer object."""
        return {
            "id": self.call.sequences[0].rid,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _respond(request, lambda body, _: completion_body(body), CompletionShape())


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _respond(request, chat_body, ChatShape())


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return json_reply({"object": "list", "data": [_model_card(request.app[STATE])]})


async def one_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    state, name = request.app[STATE], request.match_info["model"]
    if name != state.served_model_name:
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_reply({"error": error}, 404)
    return json_reply(_model_card(state))


async def _respond(
    request: web.Request,
    translate: Callable[[dict[str, Any], ServerState], dict[str, Any]],
    shape: Shape,
) -> web.StreamResponse:
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    call = parse_generate(translate(body, state), state.facts)
    options = field_of(body, "stream_options", dict, {})
    exchange = Exchange(
        state=state,
        call=call,
        shape=shape,
        model=field_of(body, "model", str, state.served_model_name),
        created=int(time.time()),
        with_usage=field_of(options, "include_usage", bool, False),
    )
    with submitted(state, call.sequences) as queues:
        if call.stream:
            return await _stream(request, exchange, queues)
        await wait_for_all(call.sequences, queues)
    return failure(call.sequences) or json_reply(_whole(exchange))


def _whole(exchange: Exchange) -> dict[str, Any]:
    reader, sequences = exchange.state.reader, exchange.call.sequences
    choices = []
    for index, sequence in enumerate(sequences):
        text = reader.text(sequence, len(sequence.output))
        fields = exchange.shape.choice(sequence, text, reader)
        choices.append({"index": index, **fields, **_ending(sequence)})
    first = sequences[0]
    return exchange.envelope(exchange.shape.kind, choices) | {
        "usage": _usage(exchange.call),
        "metadata": {
            "weight_version": first.weight_version,
            "weight_versions": version_spans(first, len(first.output)),
        },
    }


async def _stream(request: web.Request, exchange: Exchange, queues: Queues) -> web.StreamResponse:
    response = await open_stream(request)
    sequences, reader, shape = exchange.call.sequences, exchange.state.reader, exchange.shape
    texts = [StreamText(reader, sequence) for sequence in sequences]
    sent = [0] * len(sequences)
    unended = {"finish_reason": None, "matched_stop": None}

    async def send(choices: list[dict[str, Any]], usage: dict[str, Any]) -> None:
        await response.write(event(exchange.envelope(shape.chunk_kind, choices) | usage))

    for index in range(len(sequences)):
        opening = shape.opening()
        if opening is not None:
            await send([{"index": index, **opening, **unended}], {})
    async for index, progress in progress_of(sequences, queues):
        sequence = sequences[index]
        span = slice(sent[index], progress.count)
        sent[index] = progress.count
        text = texts[index].advance(progress.count, is_end=progress.is_end)
        fields = shape.delta(sequence, text, span, reader)
        ending = _ending(sequence) if progress.is_end else unended
        await send([{"index": index, **fields, **ending}], {})
    if exchange.with_usage:
        await send([], {"usage": _usage(exchange.call)})
    await response.write(DONE)
    return response


def _ending(sequence: Sequence) -> dict[str, Any]:
    reason = sequence.finish_reason or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def _usage(call: GenerateCall) -> dict[str, Any]:
    samples = call.sequences
    # The samples of one prompt share it: it is counted once.
    prompts = {id(sequence.prompt): len(sequence.prompt) for sequence in samples}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(len(sequence.output) for sequence in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.served_model_name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "rollmill",
        "root": state.served_model_name,
        "parent": None,
        "max_model_len": state.facts.context_length,
    }
