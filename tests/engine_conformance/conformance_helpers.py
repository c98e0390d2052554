"""Shared by the conformance tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmill.config.engine import EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.http import new_session


@asynccontextmanager
async def streaming(url: str, interval: int) -> AsyncIterator[EngineClient]:
    """A client whose answers come in pieces."""
    config = EngineConfig(request_timeout_s=60, stream_interval=interval)
    async with new_session() as session:
        client = EngineClient(url, config, session)
        try:
            yield client
        finally:
            await client.close()


async def until_running(client: EngineClient, number: int) -> None:
    """Poll the engine until it works on `number` requests."""
    while sum(load.num_running_reqs for load in await client.loads()) < number:
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0.005))])
