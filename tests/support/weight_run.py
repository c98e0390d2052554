"""A trainer and engines, all real processes, for tests of weight transports."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import make_tiny_model

from rollmill.cluster.local import LocalWorker
from rollmill.cluster.ranks import RankGroup, Worker
from rollmill.config import Config
from rollmill.config.trainer import TrainerConfig
from rollmill.engine.pool import EnginePool
from rollmill.trainer.worker import TorchTrainer
from rollmill.weights import open_transport
from rollmill.weights.base import Transport

TRAINER = "weight_run:ScaledTrainer"
HIDDEN_SIZE = 256
"""Large enough for several buckets of 1 MB."""


class ScaledTrainer(TorchTrainer):
    """A trainer whose weights change when a test says so."""

    def scale(self, factor: float) -> None:
        """Multiply every weight."""
        with torch.no_grad():
            for parameter in self._policy.model.parameters():
                parameter.mul_(factor)

    def shift(self, amount: float) -> None:
        """Add to every weight that is trained: with adapters, to theirs."""
        with torch.no_grad():
            for parameter in self._policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(amount)


@dataclass
class WeightRun:
    """The parts of a run that a weight sync needs."""

    config: Config
    folder: Path
    pool: EnginePool
    trainer: Worker
    transport: Transport
    version: int = 0
    num_exports: int = 0

    def use(self, transport: str) -> None:
        """Go on with another transport."""
        weights = self.config.weights.model_copy(update={"transport": transport})
        config = self.config.model_copy(update={"weights": weights})
        self.transport = open_transport(config, self.folder / "run")

    async def train(self, factor: float = 1.02) -> None:
        """Change the trainer's weights."""
        await self.trainer.call("scale", factor=factor)

    async def sync(self) -> dict[str, float]:
        """Bring them to the engines as the next version."""
        self.version += 1
        return await self.transport.sync(self.trainer, self.pool, self.version)

    async def expected(self) -> dict[str, str]:
        """Checksums of the trainer's weights, by way of an export: no code of the transports."""
        self.num_exports += 1
        folder = self.folder / f"export_{self.num_exports}"
        await self.trainer.call("export", path=str(folder), dtype=self.config.engine.embedded.dtype)
        return {
            name: f"{zlib.crc32(tensor.view(torch.uint8).numpy().tobytes()):08x}"
            for name, tensor in load_file(folder / "model.safetensors").items()
        }

    async def served(self) -> list[dict[str, str]]:
        """Checksums of the weights that each ready engine serves."""
        return [sums.by_weight for sums in (await self.pool.checksums()).values()]

    async def until_ready(self, number: int) -> None:
        """Poll the pool until so many engines take requests."""
        while self.pool.stats().num_ready < number:
            await asyncio.wait([asyncio.create_task(asyncio.sleep(0.02))])


@asynccontextmanager
async def weight_run(
    folder: Path,
    *,
    num_engines: int = 2,
    num_ranks: int = 1,
    trainer_config: dict[str, Any] | None = None,
    **weights: Any,
) -> AsyncIterator[WeightRun]:
    """Start everything; stop it at the end.

    Args:
        folder: for all files.
        num_engines: embedded engines.
        num_ranks: processes of the trainer.
        trainer_config: the section `trainer`.
        weights: the section `weights`.
    """
    model = make_tiny_model(folder / "model", hidden_size=HIDDEN_SIZE, layers=2)
    config = Config.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": "unused.jsonl"},
            "engine": {
                "num_engines": num_engines,
                "health_interval_s": 0.2,
                "embedded": {"dtype": "bfloat16", "num_threads": 1, "device": "cpu"},
            },
            "weights": {"dir": str(folder / "shared"), "timeout_s": 20} | weights,
        }
    )
    settings = TrainerConfig(num_threads=1, device="cpu", **trainer_config or {})
    async with AsyncExitStack() as stack:
        pool = EnginePool(config.engine, model_path=str(model), run_dir=folder / "run")
        trainer = _worker(folder, num_ranks)
        stack.push_async_callback(trainer.stop)
        await asyncio.gather(
            stack.enter_async_context(pool),
            trainer.start(
                config=settings.model_dump(mode="json"),
                model_path=str(model),
                seed=0,
                num_total_steps=1,
                context_length=64,
            ),
        )
        transport = open_transport(config, folder / "run")
        stack.push_async_callback(transport.close)
        yield WeightRun(config, folder, pool, trainer, transport)


def _worker(folder: Path, num_ranks: int) -> Worker:
    place: dict[str, Any] = {
        "name": "trainer",
        "log_path": folder / "run" / "logs" / "trainer.log",
        "environment": {"PYTHONPATH": str(Path(__file__).parent)},
    }
    if num_ranks == 1:
        return LocalWorker(TRAINER, **place)
    return RankGroup(TRAINER, num_ranks=num_ranks, **place)
