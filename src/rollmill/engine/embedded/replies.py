"""JSON in and out, and SGLang's error shapes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from rollmill.engine.embedded.engine import BusyError
from rollmill.engine.embedded.sampling import BodyError, RequestError, UnknownFieldError

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""What web servers note when a client closed its connection."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_reply(value: object, status: int = 200) -> web.Response:
    """`value` as JSON; NaN and infinity become null."""
    return web.Response(
        body=orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS),
        status=status,
        content_type="application/json",
    )


def bad_request(message: str, status: int = 400, kind: str = "Bad Request") -> web.Response:
    """The shape of errors that SGLang's web framework finds."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return json_reply(body, status)


def message_error(message: str, status: int = 400) -> web.Response:
    """The shape of errors that SGLang's own code finds."""
    return json_reply({"error": {"message": message}}, status)


async def read_body(request: web.Request, *, is_required: bool = False) -> dict[str, Any]:
    """The request's JSON object; an empty body is `{}` unless it is required.

    Raises:
        BodyError: no JSON, or JSON that is no object.
    """
    raw = await request.read()
    if not raw.strip():
        if is_required:
            raise BodyError("1 validation error: {'type': 'missing', 'loc': ('body',)}")
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BodyError(f"1 validation error: {{'type': 'json_invalid', 'msg': {error}}}") from None
    if not isinstance(body, dict):
        raise BodyError("the body must be a JSON object")
    return body


def field_of(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """`body[name]` if it has the right type; null and absence give the default.

    Raises:
        BodyError: another type.
    """
    value = body.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise BodyError(f"{name} must be {kind.__name__}; got {type(value).__name__}")
    return value


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every failure in SGLang's shapes; what we did not foresee is logged and gives 500."""
    try:
        return await handler(request)
    except UnknownFieldError as error:
        return json_reply({"error": str(error)}, 400)
    except BodyError as error:
        return bad_request(str(error))
    except (RequestError, BusyError) as error:
        return message_error(str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return json_reply({"detail": error.reason}, error.status)
    except ConnectionError:  # the client is gone, and its request aborted: nobody reads an answer
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response(status=CLIENT_LEFT)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return bad_request("Internal server error", 500, "InternalServerError")
