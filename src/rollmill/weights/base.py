"""What every weight transport does, in the same order.

One sync: the trainer prepares the weights while generation goes on; generation is held; caches are
flushed; the weights are delivered and every engine confirms the version; generation goes on;
checksums are compared. Invariants: generation goes on whether or not the update worked; on failure
the engines keep serving the old version, and engines that come back still get it; nothing waits
without end. Shared memory that turns out to be full costs a second try, in the run's folder.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.delivery import Delivery
from rollmill.engine.types import HoldMode
from rollmill.engine.weight_calls import WeightSums
from rollmill.weights.folders import SharedFolder, WeightsNotWritten
from rollmill.weights.sums import TrainerSums, check_sums

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class Trainer(Protocol):
    """What a sync needs of the trainer."""

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Run a method of the trainer in its process."""


class Engines(Protocol):
    """What a sync needs of the engines; `EnginePool` is one."""

    @property
    def clients(self) -> Sequence[EngineClient]:
        """One client per engine."""

    @property
    def ready_clients(self) -> Sequence[EngineClient]:
        """Those of the engines that take requests now."""

    async def pause_all(self, mode: HoldMode) -> None:
        """Hold generation."""

    async def resume_all(self) -> None:
        """Go on."""

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""

    async def install(self, delivery: Delivery, version: int, *, flush_cache: bool = True) -> None:
        """Deliver and confirm."""

    async def checksums(self) -> dict[str, WeightSums]:
        """Checksums of the weights by engine."""


@dataclass(frozen=True)
class Shipment:
    """One version of the weights, ready to go.

    Attributes:
        delivery: how engines get it.
        sums: the checksums it has, when the trainer told them.
        is_checked_by_engines: engines compare checksums themselves when they take it.
        metrics: what preparing it showed.
    """

    delivery: Delivery
    sums: TrainerSums | None = None
    is_checked_by_engines: bool = False
    metrics: Metrics = field(default_factory=dict)


class Transport(ABC):
    """A way for weights to go from the trainer to the engines.

    Args:
        config: the section `weights`.
        folders: where versions lie that engines read.
    """

    def __init__(self, config: WeightsConfig, folders: SharedFolder) -> None:
        self._config = config
        self._folders = folders

    @property
    @abstractmethod
    def needs_trainer(self) -> bool:
        """Whether an engine that comes back gets its weights from the trainer, which must then
        outlive the engines."""

    async def sync(self, trainer: Trainer, pool: Engines, version: int) -> Metrics:
        """Bring the trainer's weights to every engine, as `version`.

        Returns:
            Metrics: `weights/prepare_s` (generation goes on meanwhile), `weights/pause_s` (how long
            it was held), `weights/update_s`, `weights/num_bytes`, and where known
            `weights/changed_share`, `weights/verify_s` and `weights/is_full_sync`.

        Raises:
            WeightsNotWritten: there is no room for the weights; the engines were not held.
            EngineError: no engine took them, and the old ones are still served; or an engine's
                checksums are not the trainer's.
        """
        started = time.monotonic()
        try:
            shipment = await self._prepare_where_there_is_room(trainer, pool, version)
            prepare_s = time.monotonic() - started
            timing = await self._install(pool, shipment.delivery, version)
            await self._is_served(trainer, shipment)
        finally:
            await self._clean_up()
        verification = await self._verify(pool, shipment)
        return {
            "weights/prepare_s": prepare_s,
            **timing,
            **verification,
            **shipment.metrics,
            **self._outcome(shipment),
        }

    @abstractmethod
    async def close(self) -> None:
        """Leave nothing behind. Call when no engine may come back any more."""

    @abstractmethod
    async def _prepare(self, trainer: Trainer, pool: Engines, version: int) -> Shipment:
        """Everything that can be done while generation goes on."""

    @abstractmethod
    async def _is_served(self, trainer: Trainer, shipment: Shipment) -> None:
        """The engines serve the shipment from now on."""

    @abstractmethod
    async def _clean_up(self) -> None:
        """Remove what is not served: the version before, or one that did not get there."""

    async def _prepare_where_there_is_room(
        self, trainer: Trainer, pool: Engines, version: int
    ) -> Shipment:
        """Prepare; once more in the run's folder when shared memory has no room."""
        try:
            return await self._prepare(trainer, pool, version)
        except WeightsNotWritten as error:
            if not self._folders.leave_shared_memory():
                raise
            logger.warning("weights go to the run's folder from now on: %s", error)
        await self._clean_up()
        return await self._prepare(trainer, pool, version)

    def _outcome(self, shipment: Shipment) -> Metrics:
        """Metrics that are known only when the engines have the weights."""
        return {}

    async def _install(self, pool: Engines, delivery: Delivery, version: int) -> Metrics:
        """Pause, flush, update, continue; the last whatever happens."""
        paused = time.monotonic()
        keeps_cache = self._config.pause_mode == "in_place"
        try:
            await pool.pause_all(self._config.pause_mode)
            if not keeps_cache:
                await pool.flush_cache()
            begun = time.monotonic()
            await pool.install(delivery, version, flush_cache=not keeps_cache)
            update_s = time.monotonic() - begun
        finally:
            await _resume(pool)
        return {"weights/pause_s": time.monotonic() - paused, "weights/update_s": update_s}

    async def _verify(self, pool: Engines, shipment: Shipment) -> Metrics:
        """Compare checksums, while generation goes on."""
        if not self._config.verify_checksum or shipment.is_checked_by_engines:
            return {}
        started = time.monotonic()
        check_sums(await pool.checksums(), shipment.sums)
        return {"weights/verify_s": time.monotonic() - started}


async def _resume(pool: Engines) -> None:
    """Go on; a cancelled sync waits for it too."""
    resume = asyncio.ensure_future(pool.resume_all())
    try:
        await asyncio.shield(resume)
    except asyncio.CancelledError:
        await asyncio.gather(resume, return_exceptions=True)
        raise


def write_metrics(written: dict[str, Any]) -> Metrics:
    """Metrics of what the trainer said about the weights it wrote or staged."""
    known = {name: written.get(name) for name in ("num_bytes", "changed_share")}
    return {f"weights/{name}": float(value) for name, value in known.items() if value is not None}
