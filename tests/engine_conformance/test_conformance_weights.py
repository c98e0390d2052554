"""Weight transports with every engine: new weights go in, are served, and the old come back.

The trainer's side is a model in this process; the engines' side is a pool attached to the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_helpers import until_running
from transformers import AutoModelForCausalLM

from rollmill.config import Config
from rollmill.engine.pool import EnginePool
from rollmill.trainer.weight_files import WeightWriter
from rollmill.trainer.weight_methods import WeightMethods
from rollmill.trainer.weight_sender import WeightSender
from rollmill.trainer.weight_store import WeightStore
from rollmill.weights import open_transport
from rollmill.weights.base import Transport

PROMPT = [5, 9, 12, 7, 33]
SHORT = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
LONG = SHORT | {"max_new_tokens": 500}


class ModelTrainer(WeightMethods):
    """A model in this process that answers as the trainer's process does."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._writer = WeightWriter(self.model)
        self._store = WeightStore(self.model)
        self._sender = WeightSender(self._store, is_sender=True, device=torch.device("cpu"))

    def write_weights(self, path: str, *, dtype: str) -> dict[str, Any]:
        return self._writer.write(Path(path), dtype=dtype)

    async def call(self, method: str, /, **arguments: Any) -> Any:
        return await asyncio.to_thread(getattr(self, method), **arguments)

    def scale(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)


@asynccontextmanager
async def opened(
    target: Any, folder: Path, transport: str
) -> AsyncIterator[tuple[ModelTrainer, EnginePool, Transport]]:
    config = Config.model_validate(
        {
            "model": {"path": target.model},
            "data": {"path": "unused.jsonl"},
            "engine": {"urls": [target.url], "embedded": {"dtype": "float32"}},
            "weights": {"transport": transport, "dir": str(folder / "shared"), "bucket_mb": 1},
        }
    )
    trainer = ModelTrainer(target.model)
    sync = open_transport(config, folder / "run")
    async with EnginePool(config.engine, model_path=target.model, run_dir=folder) as pool:
        try:
            yield trainer, pool, sync
        finally:
            await sync.close()


@pytest.mark.parametrize("transport", ["disk", "distributed", "tensor"])
def test_weights_go_in_are_served_and_come_back(
    target: Any, tmp_path: Path, transport: str
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(100),
            opened(target, tmp_path, transport) as (trainer, pool, sync),
        ):
            await sync.sync(trainer, pool, 100)
            before = await pool.generate("a", PROMPT, SHORT)
            totals = {sums.total for sums in (await pool.checksums()).values()}
            trainer.scale(0.25)
            await sync.sync(trainer, pool, 101)
            other = await pool.generate("b", PROMPT, SHORT)
            assert other.versions == (101,)
            assert other.log_probs.tolist() != before.log_probs.tolist()
            trainer.scale(4.0)  # a power of two: exactly what they were
            await sync.sync(trainer, pool, 102)
            back = await pool.generate("c", PROMPT, SHORT)
            assert back.versions == (102,)
            assert back.token_ids.tolist() == before.token_ids.tolist()
            assert {sums.total for sums in (await pool.checksums()).values()} == totals

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["disk", "distributed", "tensor"])
def test_a_request_in_flight_is_kept_and_says_which_weights_wrote_what(
    target: Any, tmp_path: Path, transport: str
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(100),
            opened(target, tmp_path, transport) as (trainer, pool, sync),
        ):
            await sync.sync(trainer, pool, 110)
            task = asyncio.create_task(pool.generate("a", PROMPT, LONG))
            await until_running(pool.clients[0], 1)
            await sync.sync(trainer, pool, 111)
            result = await task
            assert result.num_tokens == 500
            assert result.versions in ((110, 111), (111,))

    asyncio.run(main())
