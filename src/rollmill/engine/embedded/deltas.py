"""Weight updates by what changed: an extension of SGLang's API.

The new weights are worked out beside the old ones while the engine goes on, checked against the
checksums that the delta promises, and put in between two steps. So an engine that holds other
weights than the delta's base refuses, and keeps what it has. Working them out takes long and can be
asked for by itself, before generation is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from rollmill.engine.embedded import checkpoint
from rollmill.engine.embedded.engine import BusyError
from rollmill.engine.embedded.replies import field_of, json_reply, read_body
from rollmill.engine.embedded.sampling import RequestError
from rollmill.engine.embedded.state import STATE, PreparedDelta, ServerState
from rollmill.errors import ModelError
from rollmill.exchange.checksum import checksums_of, total_of
from rollmill.exchange.delta import apply_delta, read_delta

OTHER_BASE = 409
"""HTTP status when the engine's weights are not those that the delta starts from."""


class OtherBaseError(Exception):
    """The engine's weights are not those that the delta starts from."""


async def prepare_weights_from_delta(request: web.Request) -> web.Response:
    """POST /prepare_weights_from_delta {path}: all of an update but putting it in.

    Answers `prepared`, the number by which `/update_weights_from_delta` finds it. It is kept, at
    the cost of one more copy of the weights that change, until the next call of either. Errors as
    of `/update_weights_from_delta`. Generation goes on.
    """
    state = request.app[STATE]
    path, _ = await _path_of(request)
    async with state.update_lock:
        state.prepared = None  # first, so that there are never two copies
        changed = await _work_out(state, path)
        if isinstance(changed, web.Response):
            return changed
        state.num_prepared += 1
        number, num_updates = state.num_prepared, state.engine.num_updates
        state.prepared = PreparedDelta(number, num_updates, changed)
    message = f"{len(changed)} weights will change"
    return json_reply({"success": True, "message": message, "prepared": number})


async def update_weights_from_delta(request: web.Request) -> web.Response:
    """POST /update_weights_from_delta {path, weight_version, prepared?}.

    200 when the engine serves exactly the target's weights; 409 when it holds others than the
    base; 400 when the file cannot be used. The old weights stay on any failure. What `prepared`
    names is put in if it still fits; otherwise the new weights are worked out now.
    """
    state = request.app[STATE]
    path, body = await _path_of(request)
    version = field_of(body, "weight_version", str, None)
    number = field_of(body, "prepared", int, None)
    engine = state.engine
    async with state.update_lock:
        ready, state.prepared = state.prepared, None
        changed: dict[str, torch.Tensor] | web.Response
        if ready and (ready.number, ready.num_updates) == (number, engine.num_updates):
            changed = ready.changed
        else:
            del ready  # its memory is wanted
            changed = await _work_out(state, path)
        if isinstance(changed, web.Response):
            return changed
        new = changed
        try:
            await asyncio.wrap_future(
                engine.call(lambda: engine.replace_weights(new, version, abort_all=False))
            )
        except BusyError as error:
            return _reply(False, str(error), 400)
    return _reply(True, f"{len(changed)} weights changed", 200)


async def _path_of(request: web.Request) -> tuple[Path, dict[str, Any]]:
    """The delta's path, and the whole body."""
    body = await read_body(request, is_required=True)
    path = field_of(body, "path", str, None)
    if path is None:
        raise RequestError("path is required")
    return Path(path), body


async def _work_out(state: ServerState, path: Path) -> dict[str, torch.Tensor] | web.Response:
    """The new values of the weights that change, or the answer that says why there are none."""
    if "weights" in state.engine.released:
        return _reply(False, "the weights are released; resume them before an update", 400)
    weights = checkpoint.own_weights(state.engine.runner.model)
    try:
        return await asyncio.to_thread(_changed, path, weights)
    except OtherBaseError as error:
        return _reply(False, str(error), OTHER_BASE)
    except ModelError as error:
        return _reply(False, str(error), 400)


def _changed(path: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The new values of the weights that the delta changes.

    Raises:
        OtherBaseError: `weights` are not the base.
        ModelError: the file is damaged, or does not lead where it says.
    """
    delta = read_delta(path)
    base, target = delta.header.base, delta.header.target
    own = checksums_of(weights)
    if own != base.checksums:
        raise OtherBaseError(
            f"the delta starts from version {base.version} with checksum {base.total}; "
            f"this engine's weights have {total_of(own)}"
        )
    changed = apply_delta(delta, weights)
    unchanged = {name: value for name, value in own.items() if name not in changed}
    if any(target.checksums.get(name) != value for name, value in unchanged.items()):
        raise ModelError("the delta leaves out weights that its target has other values of")
    return changed


def _reply(success: bool, message: str, status: int) -> web.Response:
    return json_reply({"success": success, "message": message}, status)
