"""Weights over HTTP: updates, versions, values and checksums."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rollmill.engine.embedded import checkpoint
from rollmill.engine.embedded.engine import BusyError
from rollmill.engine.embedded.replies import field_of, json_reply, message_error, read_body
from rollmill.engine.embedded.sampling import RequestError
from rollmill.engine.embedded.state import STATE
from rollmill.errors import ModelError
from rollmill.exchange.buckets import specs_of
from rollmill.exchange.checksum import ALGORITHM, checksums_of, total_of

_LOAD_FORMATS = ("auto", "safetensors")


async def update_weights_from_disk(request: web.Request) -> web.Response:
    """POST /update_weights_from_disk: all weights or none.

    The files are read while the engine goes on; only the copy happens between two steps.
    Requests that run keep their KV cache and go on with the new weights.
    """
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    path = field_of(body, "model_path", str, None)
    if path is None:
        raise RequestError("model_path is required")
    version = field_of(body, "weight_version", str, None)
    abort_all = field_of(body, "abort_all_requests", bool, False)
    if field_of(body, "load_format", str, "auto") not in _LOAD_FORMATS:
        return _failed(f"load_format must be one of {_LOAD_FORMATS}")
    engine = state.engine
    async with state.update_lock:
        try:
            weights = await asyncio.to_thread(checkpoint.read_checkpoint, path, engine.runner.model)
            await asyncio.wrap_future(
                engine.call(lambda: engine.replace_weights(weights, version, abort_all=abort_all))
            )
        except (ModelError, BusyError) as error:
            return _failed(str(error))
        state.model_path = path
    return json_reply({"success": True, "message": _updated(version), "num_paused_requests": 0})


async def update_weight_version(request: web.Request) -> web.Response:
    """POST /update_weight_version: a new name for the loaded weights.

    `abort_all_requests` is true by default, as in SGLang.
    """
    engine = request.app[STATE].engine
    body = await read_body(request, is_required=True)
    version = field_of(body, "new_version", str, None)
    if version is None:
        raise RequestError("new_version is required")
    if field_of(body, "abort_all_requests", bool, True):
        engine.abort(lambda _: True)

    def rename() -> None:
        engine.weight_version = version

    await asyncio.wrap_future(engine.call(rename))
    message = f"Weight version updated to {version}"
    return json_reply({"success": True, "message": message, "new_version": version})


async def get_weights_by_name(request: web.Request) -> web.Response:
    """GET|POST /get_weights_by_name {name, truncate_size}: the first entries of a weight."""
    body = await read_body(request)
    query = request.query
    name = field_of(body, "name", str, query.get("name"))
    size = field_of(body, "truncate_size", int, 100)
    engine = request.app[STATE].engine

    def look() -> object | None:
        weight = engine.runner.parameter(name or "")
        return None if weight is None else weight[:size].float().cpu().tolist()

    values = await asyncio.wrap_future(engine.call(look))
    if values is None:
        return message_error("Get parameter by name failed")
    return json_reply(values)


async def weights_checker(request: web.Request) -> web.Response:
    """GET|POST /weights_checker {action: "checksum"}: a checksum per weight and one of all.

    `algorithm` and `dtypes` are extensions, for those who hold the same weights and want to compare
    theirs. Generation goes on meanwhile; updates wait.
    """
    state = request.app[STATE]
    body = await read_body(request)
    if field_of(body, "action", str, "checksum") != "checksum":
        raise RequestError("the embedded engine knows one action: checksum")
    async with state.update_lock:
        if "weights" in state.engine.released:
            raise BusyError("the weights are released; resume them before asking for checksums")
        weights = checkpoint.own_weights(state.engine.runner.model)
        sums = await asyncio.to_thread(checksums_of, weights)
    total = total_of(sums)
    rank = {
        "checksums": sums,
        "algorithm": ALGORITHM,
        "dtypes": {spec.name: spec.dtype for spec in specs_of(weights)},
        "per_gpu_checksum": total,
        "parallelism_info": {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "pp_rank": 0, "pp_size": 1},
    }
    return json_reply(
        {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": total}
    )


def _updated(version: str | None) -> str:
    message = "Succeeded to update model weights."
    return message if version is None else f"{message} Weight version updated to {version}."


def _failed(message: str) -> web.Response:
    body = {"success": False, "message": message, "num_paused_requests": 0}
    return json_reply(body, status=400)
