"""Weight updates by torch.distributed over HTTP: groups, and what arrives through them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rollmill.engine.embedded.groups import TIMEOUT_S
from rollmill.engine.embedded.replies import field_of, read_body
from rollmill.engine.embedded.sampling import RequestError
from rollmill.engine.embedded.sessions import outcome, read_specs, take_in
from rollmill.engine.embedded.state import STATE
from rollmill.exchange.specs import LOAD_FORMAT

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
            return outcome(False, f"Failed to initialize custom process group: {error}")
    return outcome(True, "Succeeded to initialize custom process group.")


async def destroy_weights_update_group(request: web.Request) -> web.Response:
    """POST /destroy_weights_update_group."""
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    name = field_of(body, "group_name", str, _DEFAULT_GROUP)
    async with state.group_lock:
        try:
            await asyncio.to_thread(state.groups.leave, name)
        except (RequestError, RuntimeError) as error:
            return outcome(False, f"Failed to destroy custom process group: {error}")
    return outcome(True, "Succeeded to destroy custom process group.")


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """POST /update_weights_from_distributed: receives tensors into the open session."""
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    specs = read_specs(body)
    load_format = field_of(body, "load_format", str, None)
    if load_format not in (None, "auto", LOAD_FORMAT):
        raise RequestError(f"load_format must be absent or {LOAD_FORMAT!r}")
    group = field_of(body, "group_name", str, _DEFAULT_GROUP)
    return await take_in(
        state,
        body,
        "update_weights_from_distributed",
        lambda: state.groups.receive(group, specs, is_bucket=load_format == LOAD_FORMAT),
    )
