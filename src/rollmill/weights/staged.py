"""Weights that the trainer keeps staged, and the whole folder of them that an engine may need.

Transports that do not leave whole weights anywhere still have to serve an engine that starts anew,
or that missed an update. The trainer then writes the staged weights into the shared folder, once
per version and only when asked. It does so after what it is doing at that moment (a training step,
say); the engine is stale until then.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.delivery import Outcomes
from rollmill.engine.errors import EngineFailed
from rollmill.errors import RollmillError
from rollmill.exchange.specs import WeightSpec
from rollmill.weights.base import Engines, Shipment, Trainer, Transport, write_metrics
from rollmill.weights.folders import SharedFolder, WeightsNotWritten
from rollmill.weights.sums import TrainerSums

WHOLE = "whole"
"""Name of the folder with whole weights inside a version's folder."""


@dataclass(frozen=True)
class Staged:
    """Weights of one version, staged at the trainer.

    Attributes:
        trainer: who has them.
        stage: their number there.
        version: what engines call them.
        folder: this version's part of the shared folder.
        report: what the trainer said of them.
    """

    trainer: Trainer
    stage: int
    version: int
    folder: Path
    report: Mapping[str, Any]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def specs(self) -> list[WeightSpec]:
        """The weights, in the order in which they are sent."""
        return [
            WeightSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.report["weights"]
        ]

    async def whole_folder(self) -> Path:
        """A folder with all of the weights; written the first time that it is asked for.

        Raises:
            WeightsNotWritten: there is no room for it.
        """
        async with self._lock:
            path = self.folder / WHOLE
            if path.is_dir():
                return path
            aside = self.folder / f"{WHOLE}.part"
            try:
                self.folder.mkdir(exist_ok=True)
                report = await self.trainer.call("write_staged", stage=self.stage, path=str(aside))
                if "error" in report:
                    raise WeightsNotWritten.to(path, report["error"])
                aside.rename(path)
            except OSError as error:
                raise WeightsNotWritten.to(path, str(error)) from error
            return path

    async def load_whole(self, client: EngineClient, *, flush_cache: bool = True) -> None:
        """Have one engine load all of the weights from the folder.

        Raises:
            EngineCallError: it did not, or the weights cannot be had.
        """
        try:
            path = await self.whole_folder()
        except RollmillError as error:
            raise EngineFailed(
                "the weights that an engine needs cannot be had",
                where=str(self.folder),
                found=str(error),
            ) from error
        await client.update_weights_from_disk(str(path), self.version, flush_cache=flush_cache)


class StagedDelivery(ABC):
    """A delivery of staged weights; engines that missed it load all of them from a folder.

    Args:
        staged: the weights.
    """

    def __init__(self, staged: Staged) -> None:
        self.staged = staged

    @abstractmethod
    async def deliver(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Outcomes:
        """Bring the weights to these engines."""

    async def renew(self, client: EngineClient) -> None:
        """The engine loads all of the weights."""
        await self.staged.load_whole(client)


class StagedTransport(Transport):
    """A transport whose weights stay staged at the trainer while they are served.

    Args:
        config: the section `weights`.
        run_dir: the run's folder.
        dtype: precision that the engines serve.
    """

    def __init__(self, config: WeightsConfig, run_dir: Path, *, dtype: str) -> None:
        super().__init__(config, SharedFolder(config, run_dir, num_bytes=None))
        self._dtype = dtype
        self._next: Staged | None = None
        self._served: Staged | None = None

    @property
    def needs_trainer(self) -> bool:
        """Yes: it writes the weights down only when an engine asks for them."""
        return True

    async def close(self) -> None:
        """Remove everything from the shared folder."""
        await self._folders.close()
        self._served = None

    @abstractmethod
    async def _ship(self, pool: Engines, staged: Staged, served: Staged | None) -> Shipment:
        """The shipment of weights that were just staged."""

    async def _prepare(self, trainer: Trainer, pool: Engines, version: int) -> Shipment:
        served = self._served
        report: dict[str, Any] = await trainer.call(
            "stage_weights", dtype=self._dtype, keep=served.stage if served else None
        )
        self._folders.num_bytes = int(report["num_bytes"])
        self._next = Staged(trainer, report["stage"], version, self._folders.new(version), report)
        return await self._ship(pool, self._next, served)

    async def _is_served(self, trainer: Trainer, shipment: Shipment) -> None:
        self._served = self._next
        if self._served is not None:
            await trainer.call("release_weights", keep=self._served.stage)

    async def _clean_up(self) -> None:
        await self._folders.remove_all_but(self._served.folder if self._served else None)

    def _shipment(
        self, delivery: StagedDelivery, *, is_checked_by_engines: bool = False, **metrics: float
    ) -> Shipment:
        report = dict(delivery.staged.report)
        named = {f"weights/{name}": value for name, value in metrics.items()}
        return Shipment(
            delivery,
            sums=TrainerSums.read(report),
            is_checked_by_engines=is_checked_by_engines,
            metrics=write_metrics(report) | named,
        )
