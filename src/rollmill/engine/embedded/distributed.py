"""Weight updates by torch.distributed over HTTP: groups, and sessions around the updates."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from rollmill.engine.embedded import checkpoint
from rollmill.engine.embedded.engine import BusyError
from rollmill.engine.embedded.groups import TIMEOUT_S, UpdateSession
from rollmill.engine.embedded.replies import field_of, json_reply, read_body
from rollmill.engine.embedded.sampling import BodyError, RequestError
from rollmill.engine.embedded.state import STATE, ServerState
from rollmill.exchange.specs import LOAD_FORMAT, WeightSpec

_DEFAULT_GROUP = "weight_update_group"


async def init_weights_update_group(request: web.Request) -> web.Response:
    """POST /init_weights_update_group: returns when every rank has joined.

    `timeout_s`, an extension, bounds this wait and every later broadcast.
    """
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    address = field_of(body, "master_address", str, "")
    port = field_of(body, "master_port", int, 0)
    rank = field_of(body, "rank_offset", int, 1)
    world_size = field_of(body, "world_size", int, 0)
    name = field_of(body, "group_name", str, _DEFAULT_GROUP)
    backend = field_of(body, "backend", str, "nccl")
    timeout_s = field_of(body, "timeout_s", float, TIMEOUT_S)
    if not address or not 0 < port < 65536 or not 0 < rank < world_size or not timeout_s > 0:
        raise RequestError(
            "master_address, master_port in [1, 65535], 0 < rank_offset < world_size and "
            "timeout_s > 0 are needed"
        )
    async with state.group_lock:
        try:
            await asyncio.to_thread(
                state.groups.join,
                name,
                address=address,
                port=port,
                rank=rank,
                world_size=world_size,
                backend=backend,
                timeout_s=timeout_s,
            )
        except (RequestError, RuntimeError, ValueError, OSError) as error:
            return _reply(False, f"Failed to initialize custom process group: {error}")
    return _reply(True, "Succeeded to initialize custom process group.")


async def destroy_weights_update_group(request: web.Request) -> web.Response:
    """POST /destroy_weights_update_group."""
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    name = field_of(body, "group_name", str, _DEFAULT_GROUP)
    async with state.group_lock:
        try:
            await asyncio.to_thread(state.groups.leave, name)
        except (RequestError, RuntimeError) as error:
            return _reply(False, f"Failed to destroy custom process group: {error}")
    return _reply(True, "Succeeded to destroy custom process group.")


async def begin_weight_update(request: web.Request) -> web.Response:
    """POST /begin_weight_update: opens a session; updates by distribution need one."""
    state = request.app[STATE]
    await read_body(request)
    if state.session is not None:
        return _reply(
            False, "a weight-update session is already open; call end_weight_update() first"
        )
    state.session = UpdateSession()
    return _reply(True, "Success")


async def end_weight_update(request: web.Request) -> web.Response:
    """POST /end_weight_update: everything that the session brought is copied in at once.

    Nothing is when an update of the session failed, or with `discard`, an extension.
    """
    state = request.app[STATE]
    body = await read_body(request)
    is_discarded = field_of(body, "discard", bool, False)
    async with state.update_lock:
        session, state.session = state.session, None
        if session is None:
            return _reply(
                False, "no weight-update session is open; call begin_weight_update() first"
            )
        if is_discarded:
            return _reply(True, "Discarded")
        if session.failure is not None:
            return _reply(False, f"the old weights stay: {session.failure}")
        engine = state.engine
        try:
            await asyncio.wrap_future(
                engine.call(
                    lambda: engine.replace_weights(
                        session.weights, session.version, abort_all=False
                    )
                )
            )
        except BusyError as error:
            return _reply(False, str(error))
    return _reply(True, "Success")


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """POST /update_weights_from_distributed: receives tensors into the open session."""
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    specs = _described(body)
    load_format = field_of(body, "load_format", str, None)
    if load_format not in (None, "auto", LOAD_FORMAT):
        raise RequestError(f"load_format must be absent or {LOAD_FORMAT!r}")
    group = field_of(body, "group_name", str, _DEFAULT_GROUP)
    version = field_of(body, "weight_version", str, None)
    if state.session is None:
        return _reply(
            False,
            "update_weights_from_distributed must run between begin_weight_update() and "
            "end_weight_update()",
        )
    if field_of(body, "abort_all_requests", bool, False):
        state.engine.abort(lambda _: True)
    async with state.update_lock:
        try:
            received = await asyncio.to_thread(
                state.groups.receive, group, specs, is_bucket=load_format == LOAD_FORMAT
            )
            _check_fit(state, received)
        except (RequestError, RuntimeError, ValueError) as error:
            message = f"Failed to update parameter online: {error}"
            if state.session is not None:
                state.session.failure = message
            return _reply(False, message)
        if state.session is None:
            return _reply(False, "the weight-update session ended meanwhile")
        state.session.weights.update(received)
        state.session.version = version or state.session.version
    message = "Succeeded to update parameter online."
    return _reply(
        True, message if version is None else f"{message} Weight version updated to {version}."
    )


def _described(body: dict[str, Any]) -> list[WeightSpec]:
    names = field_of(body, "names", list, [])
    dtypes = field_of(body, "dtypes", list, [])
    shapes = field_of(body, "shapes", list, [])
    if not all(isinstance(text, str) for text in [*names, *dtypes]):
        raise BodyError("names and dtypes must hold strings")
    if not all(isinstance(s, list) and all(type(n) is int for n in s) for s in shapes):
        raise BodyError("shapes must hold lists of integers")
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise RequestError("names, dtypes and shapes must have the same length, at least 1")
    return [
        WeightSpec(name, dtype.removeprefix("torch."), tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _check_fit(state: ServerState, received: dict[str, Any]) -> None:
    own = checkpoint.own_weights(state.engine.runner.model)
    for name, tensor in received.items():
        if name not in own:
            raise RequestError(f"the model has no weight {name!r}")
        if tensor.shape != own[name].shape:
            raise RequestError(
                f"weight {name!r} has shape {list(tensor.shape)}, not {list(own[name].shape)}"
            )


def _reply(success: bool, message: str) -> web.Response:
    return json_reply({"success": success, "message": message}, 200 if success else 400)
