"""Update sessions of several engines: opened, closed, and who failed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineCallError, EngineFailed, EngineRefused
from rollmill.engine.weight_calls import UNKNOWN_CALL

Failures = dict[str, EngineCallError]
"""Why an engine failed, by its URL."""


async def begin(client: EngineClient, timeout_s: float) -> None:
    """Open a session; one that a killed run left open is closed first."""
    try:
        await client.weights.begin(timeout_s=timeout_s)
    except EngineRefused as error:
        if error.status == UNKNOWN_CALL:
            raise
        await client.weights.discard(timeout_s=timeout_s)
        await client.weights.begin(timeout_s=timeout_s)


async def discard(client: EngineClient, timeout_s: float) -> None:
    """Close a session that came to nothing, if the engine has one."""
    with contextlib.suppress(EngineRefused):
        await client.weights.discard(timeout_s=timeout_s)


async def on_all(
    clients: Sequence[EngineClient], calls: Sequence[Coroutine[Any, Any, None]]
) -> Failures:
    """Await one call to each engine, all at once; those that failed. Other errors are raised."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failures: Failures = {}
    for client, outcome in zip(clients, outcomes, strict=True):
        if isinstance(outcome, EngineCallError):
            failures[client.url] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return failures


def for_all(clients: Sequence[EngineClient], why: str) -> Failures:
    """The trainer could not send: a failure of every engine."""
    failed = EngineFailed("the trainer could not send the weights", found=why)
    return {client.url: failed for client in clients}
