"""`/generate`: submit, wait or stream, and abort what nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import orjson
from aiohttp import web

from rollmill.engine.embedded.broker import Progress
from rollmill.engine.embedded.replies import bad_request, json_reply, read_body
from rollmill.engine.embedded.requests import GenerateCall, parse_generate
from rollmill.engine.embedded.responses import StreamText, generate_response, version_spans
from rollmill.engine.embedded.sampling import BodyError, RequestError
from rollmill.engine.embedded.sequence import Sequence
from rollmill.engine.embedded.state import STATE, ServerState

Queues = dict[int, asyncio.Queue[Progress]]
DONE = b"data: [DONE]\n\n"


async def generate(request: web.Request) -> web.StreamResponse:
    """POST|PUT /generate."""
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    try:
        call = parse_generate(body, state.facts)
        with submitted(state, call.sequences) as queues:
            if call.stream:
                return await _stream(request, state, call, queues)
            await wait_for_all(call.sequences, queues)
    except RequestError as error:
        if body.get("stream") is True and not isinstance(error, BodyError):
            return await _stream_error(request, str(error))
        raise
    return _answer(state, call)


@contextmanager
def submitted(state: ServerState, sequences: Seq[Sequence]) -> Iterator[Queues]:
    """The sequences are in the engine; those that are unfinished at the exit are aborted.

    Raises:
        RequestError: a request id is in flight already.
    """
    taken = state.claim(sequences)
    if taken is not None:
        raise RequestError(f"Duplicate request ID detected: {taken}")
    queues = {id(sequence): state.broker.subscribe(sequence) for sequence in sequences}
    try:
        for sequence in sequences:
            state.engine.submit(sequence)
        yield queues
    finally:
        state.release(sequences)
        for sequence in sequences:
            state.broker.unsubscribe(sequence)
        left = {id(s) for s in sequences if s.finish_reason is None}
        if left:
            state.engine.abort(lambda s: id(s) in left)


async def wait_for_all(sequences: Seq[Sequence], queues: Queues) -> None:
    """Return when every sequence has ended."""
    for sequence in sequences:
        while not (await queues[id(sequence)].get()).is_end:
            pass


async def progress_of(
    sequences: Seq[Sequence], queues: Queues
) -> AsyncIterator[tuple[int, Progress]]:
    """Progress of all sequences as it comes, thinned to each one's `stream_interval`."""
    merged: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()

    async def follow(index: int, sequence: Sequence) -> None:
        queue, interval = queues[id(sequence)], sequence.params.stream_interval
        while True:
            progress = await queue.get()
            if progress.is_end or (progress.count - 1) % interval == 0:
                merged.put_nowait((index, progress))
            if progress.is_end:
                return

    followers = [asyncio.ensure_future(follow(i, s)) for i, s in enumerate(sequences)]
    try:
        num_open = len(sequences)
        while num_open:
            index, progress = await merged.get()
            num_open -= progress.is_end
            yield index, progress
    finally:
        for follower in followers:
            follower.cancel()


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Start a server-sent-events answer."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    return response


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def failure(sequences: Seq[Sequence]) -> web.Response | None:
    """The HTTP error of sequences that the engine itself failed on, if any."""
    for sequence in sequences:
        reason = sequence.finish_reason or {}
        if reason.get("status_code"):
            return bad_request(reason["message"], reason["status_code"], reason["err_type"])
    return None


def _answer(state: ServerState, call: GenerateCall) -> web.Response:
    failed = failure(call.sequences)
    if failed is not None:
        return failed
    answers = [
        generate_response(
            sequence,
            len(sequence.output),
            state.reader,
            with_token_text=call.return_text_in_logprobs,
            with_prompt_ids=call.return_prompt_token_ids,
        )
        for sequence in call.sequences
    ]
    return json_reply(answers[0] if call.is_single else answers)


async def _stream(
    request: web.Request, state: ServerState, call: GenerateCall, queues: Queues
) -> web.StreamResponse:
    response = await open_stream(request)
    texts = [StreamText(state.reader, sequence) for sequence in call.sequences]
    num_sent = [0] * len(call.sequences)
    async for index, progress in progress_of(call.sequences, queues):
        sequence, count = call.sequences[index], progress.count
        new_text = texts[index].advance(count, is_end=progress.is_end)
        chunk = generate_response(
            sequence,
            count,
            state.reader,
            start=num_sent[index],
            text=new_text if call.is_incremental else texts[index].text,
            with_token_text=call.return_text_in_logprobs,
            with_prompt_ids=call.return_prompt_token_ids,
        )
        if not progress.is_end:
            chunk["meta_info"]["finish_reason"] = None
        if call.is_incremental:
            # Not in SGLang's chunks: a reader who loses the engine knows what it has.
            chunk["meta_info"]["weight_versions"] = version_spans(sequence, count)
            num_sent[index] = count
        if not call.is_single:
            chunk["index"] = index
        await response.write(event(chunk))
    await response.write(DONE)
    return response


async def _stream_error(request: web.Request, message: str) -> web.StreamResponse:
    response = await open_stream(request)
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    await response.write(event({"error": error}))
    await response.write(DONE)
    return response
