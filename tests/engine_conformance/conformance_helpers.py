"""Shared by the conformance tests."""

from __future__ import annotations

import asyncio

from rollmill.engine.client import EngineClient


async def until_running(client: EngineClient, number: int) -> None:
    """Poll the engine until it works on `number` requests."""
    while sum(load.num_running_reqs for load in await client.loads()) < number:
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0.005))])
