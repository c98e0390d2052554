"""Moving weights through a folder that trainer and engines share.

The trainer writes a folder of its own for each version, and every engine loads it. The folder of
the version that is served stays, for engines that come back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollmill.config.weights import WeightsConfig
from rollmill.engine.delivery import FolderDelivery
from rollmill.errors import TrainerError
from rollmill.weights.base import Engines, Shipment, Trainer, Transport, write_metrics
from rollmill.weights.folders import SharedFolder, WeightsNotWritten
from rollmill.weights.sums import TrainerSums


class DiskTransport(Transport):
    """Weight sync through safetensors in a folder.

    Args:
        config: where, and what running requests do meanwhile.
        run_dir: the run's folder; names the sync folder and is its place when memory is short.
        dtype: precision that the engines serve.
        num_bytes: size of the weights in that precision, when known.
    """

    def __init__(
        self, config: WeightsConfig, run_dir: Path, *, dtype: str, num_bytes: int | None = None
    ) -> None:
        super().__init__(config, SharedFolder(config, run_dir, num_bytes=num_bytes))
        self._dtype = dtype
        self._target: Path | None = None
        self._served: Path | None = None

    @property
    def needs_trainer(self) -> bool:
        """No: the weights lie in the folder."""
        return False

    async def close(self) -> None:
        """Remove everything from the shared folder."""
        await self._folders.close()
        self._served = None

    async def _prepare(self, trainer: Trainer, pool: Engines, version: int) -> Shipment:
        self._target = self._folders.new(version)
        written = await self._write(trainer, self._target)
        return Shipment(
            FolderDelivery(str(self._target), version),
            sums=TrainerSums.read(written),
            metrics=write_metrics(written),
        )

    async def _is_served(self, trainer: Trainer, shipment: Shipment) -> None:
        self._served = self._target

    async def _clean_up(self) -> None:
        await self._folders.remove_all_but(self._served)

    async def _write(self, trainer: Trainer, target: Path) -> dict[str, Any]:
        written: dict[str, Any] = await trainer.call(
            "write_weights", path=str(target), dtype=self._dtype
        )
        if "error" in written:
            raise WeightsNotWritten.to(target, written["error"])
        if not any(target.glob("*.safetensors")):
            raise TrainerError(
                "the trainer wrote no weights",
                where=str(target),
                expected="safetensors files",
                found=", ".join(sorted(os.listdir(target))) or "an empty folder",
            )
        self._folders.num_bytes = int(written.get("num_bytes", 0)) or self._folders.num_bytes
        return written
