"""Weight updates by what changed: an extension of SGLang's API.

The new weights are worked out beside the old ones while the engine goes on, checked against the
checksums that the delta promises, and copied in between two steps. So an engine that holds other
weights than the delta's base refuses, and keeps what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch
from aiohttp import web

from rollmill.engine.embedded import checkpoint
from rollmill.engine.embedded.engine import BusyError
from rollmill.engine.embedded.replies import field_of, json_reply, read_body
from rollmill.engine.embedded.sampling import RequestError
from rollmill.engine.embedded.state import STATE
from rollmill.errors import ModelError
from rollmill.exchange.checksum import checksums_of, total_of
from rollmill.exchange.delta import apply_delta, read_delta

OTHER_BASE = 409
"""HTTP status when the engine's weights are not those that the delta starts from."""


class OtherBaseError(Exception):
    """The engine's weights are not those that the delta starts from."""


async def update_weights_from_delta(request: web.Request) -> web.Response:
    """POST /update_weights_from_delta {path, weight_version}.

    200 when the engine serves exactly the target's weights; 409 when it holds others than the
    base; 400 when the file cannot be used. The old weights stay on any failure.
    """
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    path = field_of(body, "path", str, None)
    if path is None:
        raise RequestError("path is required")
    version = field_of(body, "weight_version", str, None)
    engine = state.engine
    async with state.update_lock:
        if "weights" in engine.released:
            return _reply(False, "the weights are released; resume them before an update", 400)
        weights = checkpoint.own_weights(engine.runner.model)
        try:
            changed = await asyncio.to_thread(_changed, Path(path), weights)
            await asyncio.wrap_future(
                engine.call(lambda: engine.replace_weights(changed, version, abort_all=False))
            )
        except OtherBaseError as error:
            return _reply(False, str(error), OTHER_BASE)
        except (ModelError, BusyError) as error:
            return _reply(False, str(error), 400)
    return _reply(True, f"{len(changed)} weights changed", 200)


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
