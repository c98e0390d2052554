"""What goes wrong with single transports: engines that die in mid-update, or hold other weights."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model
from weight_run import WeightRun, weight_run

from rollmill.engine.client import EngineClient
from rollmill.engine.weight_calls import WeightCalls


class DyingCalls(WeightCalls):
    """Calls to an engine that is killed when weights are about to come."""

    def __init__(self, client: EngineClient, pid: int) -> None:
        super().__init__(client._http)
        self._pid = pid

    async def receive(self, bucket: Sequence[Any], group: str, **options: Any) -> None:
        os.kill(self._pid, signal.SIGKILL)
        await super().receive(bucket, group, **options)


def test_a_broadcast_survives_an_engine_that_dies_in_it_and_ranks_of_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(120),
            weight_run(tmp_path, num_ranks=2, transport="distributed", bucket_mb=1) as run,
        ):
            await run.train()
            await run.sync()
            assert await run.served() == [await run.expected()] * 2
            dying = run.pool.clients[0]
            dying.weights = DyingCalls(dying, run.pool.pids[0] or 0)
            await run.train()
            await run.sync()
            assert await run.served() == [await run.expected()]
            dying.weights = WeightCalls(dying._http)
            await run.until_ready(2)
            await run.sync()
            assert await run.served() == [await run.expected()] * 2
            run.use("delta")
            for _ in range(2):
                await run.train(1.001)
                metrics = await run.sync()
                assert await run.served() == [await run.expected()] * 2
            assert metrics["weights/is_full_sync"] == 0
            await other_weights(run, tmp_path)

    async def other_weights(run: WeightRun, folder: Path) -> None:
        """An engine that somebody gave other weights gets all of them, which is told."""
        stranger = make_tiny_model(folder / "stranger", seed=9, hidden_size=64, layers=2)
        await run.pool.clients[1].update_weights_from_disk(str(stranger), run.version)
        await run.train(1.001)
        metrics = await run.sync()
        assert metrics["weights/is_full_sync"] == 1
        assert "gets all weights" in caplog.text
        assert await run.served() == [await run.expected()] * 2

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
