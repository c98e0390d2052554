"""How engines get the weights of one version.

The pool decides which engines get new weights, when, and what a failure means; a delivery knows how
one version travels. Invariant: an engine whose outcome is an error serves the old weights, or none
that anybody will use: it gets no requests before it was renewed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineCallError

Outcomes = list[EngineCallError | None]


class Delivery(Protocol):
    """One version of the weights, on its way."""

    async def deliver(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Outcomes:
        """Bring the weights to these engines at the same time.

        Args:
            clients: the engines; generation is held on them.
            flush_cache: whether they forget what the old weights computed.

        Returns:
            By engine, why it did not take them; None when it did.
        """

    async def renew(self, client: EngineClient) -> None:
        """Bring the weights to one engine that started anew, or missed the delivery.

        May be called as long as this version is the one to be served.

        Raises:
            EngineCallError: it does not have them.
        """


class FolderDelivery:
    """Weights in a folder that engines can read; it stays there while the version is served.

    Args:
        path: the folder.
        version: what the weights are called.
    """

    def __init__(self, path: str, version: int) -> None:
        self._path = path
        self._version = version

    async def deliver(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Outcomes:
        """Every engine loads the folder."""
        return await outcomes_of(
            client.update_weights_from_disk(self._path, self._version, flush_cache=flush_cache)
            for client in clients
        )

    async def renew(self, client: EngineClient) -> None:
        """The engine loads the folder."""
        await client.update_weights_from_disk(self._path, self._version)


async def outcomes_of(calls: Any) -> Outcomes:
    """Await calls to engines at the same time; what each raised. Other errors are raised."""
    work: list[Coroutine[Any, Any, None]] = list(calls)
    outcomes: Outcomes = []
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if outcome is None or isinstance(outcome, EngineCallError):
            outcomes.append(outcome)
        else:
            raise outcome
    return outcomes
