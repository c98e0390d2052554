"""Weight-update sessions: what several calls bring goes in at once, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web

from rollmill.engine.embedded import checkpoint
from rollmill.engine.embedded.engine import BusyError
from rollmill.engine.embedded.groups import UpdateSession
from rollmill.engine.embedded.replies import field_of, json_reply, read_body
from rollmill.engine.embedded.sampling import BodyError, RequestError
from rollmill.engine.embedded.state import STATE, ServerState
from rollmill.exchange.specs import WeightSpec


async def begin_weight_update(request: web.Request) -> web.Response:
    """POST /begin_weight_update: opens a session; updates by distribution or by handle need one."""
    state = request.app[STATE]
    await read_body(request)
    if state.session is not None:
        return outcome(
            False, "a weight-update session is already open; call end_weight_update() first"
        )
    state.session = UpdateSession()
    return outcome(True, "Success")


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
            return outcome(
                False, "no weight-update session is open; call begin_weight_update() first"
            )
        if is_discarded:
            return outcome(True, "Discarded")
        if session.failure is not None:
            return outcome(False, f"the old weights stay: {session.failure}")
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
            return outcome(False, str(error))
    return outcome(True, "Success")


async def take_in(
    state: ServerState, body: dict[str, Any], call: str, receive: Callable[[], dict[str, Any]]
) -> web.Response:
    """Receive weights into the open session, for a call of this name; the answer.

    Args:
        state: the server's.
        body: of the request: `weight_version`, `abort_all_requests`.
        call: the name.
        receive: the weights by name; run in a thread. What it raises fails the session.
    """
    version = field_of(body, "weight_version", str, None)
    if state.session is None:
        return outcome(
            False, f"{call} must run between begin_weight_update() and end_weight_update()"
        )
    if field_of(body, "abort_all_requests", bool, False):
        state.engine.abort(lambda _: True)
    async with state.update_lock:
        try:
            received = await asyncio.to_thread(receive)
            _check_fit(state, received)
        except (RequestError, RuntimeError, ValueError, OSError) as error:
            message = f"Failed to update parameter online: {error}"
            if state.session is not None:
                state.session.failure = message
            return outcome(False, message)
        if state.session is None:
            return outcome(False, "the weight-update session ended meanwhile")
        state.session.weights.update(received)
        state.session.version = version or state.session.version
    message = "Succeeded to update parameter online."
    return outcome(
        True, message if version is None else f"{message} Weight version updated to {version}."
    )


def read_specs(body: dict[str, Any]) -> list[WeightSpec]:
    """The weights that `names`, `dtypes` and `shapes` of a request describe.

    Raises:
        BodyError: they hold other types.
        RequestError: they differ in length, or are empty.
    """
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


def _check_fit(state: ServerState, received: dict[str, torch.Tensor]) -> None:
    own = checkpoint.own_weights(state.engine.runner.model)
    for name, tensor in received.items():
        if name not in own:
            raise RequestError(f"the model has no weight {name!r}")
        if tensor.shape != own[name].shape:
            raise RequestError(
                f"weight {name!r} has shape {list(tensor.shape)}, not {list(own[name].shape)}"
            )


def outcome(success: bool, message: str) -> web.Response:
    """SGLang's answer to calls about weights."""
    return json_reply({"success": success, "message": message}, 200 if success else 400)
