"""Steering the engine: abort, pause, memory, cache, fault injection."""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args

from aiohttp import web

from rollmill.engine.embedded.engine import MEMORY_TAGS, PauseMode
from rollmill.engine.embedded.replies import field_of, json_reply, message_error, read_body
from rollmill.engine.embedded.sampling import BodyError, RequestError
from rollmill.engine.embedded.state import STATE

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    "waiting requests, the operation will not be performed.)\n"
)
_FLUSH_POLL_S = 0.02


async def abort_request(request: web.Request) -> web.Response:
    """POST /abort_request: always 200; an unknown id is ignored.

    An id that is in flight also aborts those that start with it, as SGLang's scheduler does.
    """
    state = request.app[STATE]
    body = await read_body(request)
    rid = field_of(body, "rid", str, "")
    message = field_of(body, "abort_message", str, None)
    if field_of(body, "abort_all", bool, False):
        state.engine.abort(lambda _: True, message)
    elif rid and rid in state.in_flight:
        state.engine.abort(lambda s: s.rid.startswith(rid), message)
    return web.Response()


async def pause_generation(request: web.Request) -> web.Response:
    """POST /pause_generation: returns when the engine stands still."""
    body = await read_body(request, is_required=True)
    mode = field_of(body, "mode", str, "abort")
    if mode not in get_args(PauseMode):
        raise BodyError(f"mode: Input should be 'abort', 'retract' or 'in_place'; got {mode!r}")
    engine = request.app[STATE].engine
    await asyncio.wrap_future(engine.call(lambda: engine.pause(mode)))
    return json_reply({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(request: web.Request) -> web.Response:
    """POST /continue_generation."""
    await read_body(request, is_required=True)
    engine = request.app[STATE].engine
    await asyncio.wrap_future(engine.call(engine.resume))
    return json_reply({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(request: web.Request) -> web.Response:
    """GET|POST /flush_cache?timeout=S: waits up to S seconds for the engine to be idle."""
    engine = request.app[STATE].engine
    try:
        patience = min(float(request.query.get("timeout", 0)), 3600.0)
    except ValueError:
        raise RequestError("timeout must be a number of seconds") from None
    deadline = time.monotonic() + patience
    while not await asyncio.wrap_future(engine.call(engine.flush_cache)):
        if not time.monotonic() < deadline:
            return web.Response(text="Flush cache failed.\n", status=400)
        await asyncio.sleep(_FLUSH_POLL_S)
    return web.Response(text=_FLUSHED)


async def release_memory_occupation(request: web.Request) -> web.Response:
    """GET|POST /release_memory_occupation; 400 while requests run."""
    tags = _tags(await read_body(request))
    engine = request.app[STATE].engine
    await asyncio.wrap_future(engine.call(lambda: engine.release_memory(tags)))
    return json_reply(None)


async def resume_memory_occupation(request: web.Request) -> web.Response:
    """GET|POST /resume_memory_occupation; 400 for what was not released (where SGLang dies)."""
    body = await read_body(request)
    engine = request.app[STATE].engine
    tags = _tags(body)
    try:
        await asyncio.wrap_future(engine.call(lambda: engine.resume_memory(tags)))
    except ValueError as error:
        return message_error(str(error))
    return json_reply(None)


async def slow_down(request: web.Request) -> web.Response:
    """GET|POST /slow_down: sleep after every step, to inject slowness in tests."""
    body = await read_body(request)
    delay = field_of(body, "forward_sleep_time", float, 0.0)
    if not 0 <= delay <= 60:
        raise RequestError("forward_sleep_time must be in [0, 60]")
    request.app[STATE].engine.step_delay_s = delay
    return json_reply(None)


def _tags(body: dict[str, Any]) -> set[str]:
    tags = field_of(body, "tags", list, None) or list(MEMORY_TAGS)
    unknown = [tag for tag in tags if tag not in MEMORY_TAGS]
    if unknown:
        raise RequestError(f"unknown tags {unknown[:5]}; expected some of {list(MEMORY_TAGS)}")
    return set(tags)
