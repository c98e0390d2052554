"""Moving only what changed since the weights that the engines hold.

After one step in bfloat16 most elements are what they were: small updates round to nothing. The
trainer writes the difference into the shared folder, and the engines apply it; see
`exchange/delta.py`. They work out and check the new weights before generation is held, at the cost
of one more copy of the weights that change until they are put in. An engine that holds other
weights than the difference starts from loads all of them instead, which is logged and counted.
SGLang has no call for it, so it needs embedded engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from rollmill.engine.client import EngineClient
from rollmill.engine.delivery import Outcomes, outcomes_of
from rollmill.engine.errors import EngineCallError, OtherBase
from rollmill.errors import ConfigError
from rollmill.weights.base import Engines, Metrics, Shipment
from rollmill.weights.folders import WeightsNotWritten
from rollmill.weights.staged import Staged, StagedDelivery, StagedTransport

logger = logging.getLogger(__name__)

DELTA_FILE = "weights.delta"


class DeltaTransport(StagedTransport):
    """Weight sync by differences, in files."""

    async def _ship(self, pool: Engines, staged: Staged, served: Staged | None) -> Shipment:
        if served is None:
            await _check_embedded(pool.clients)
            await staged.whole_folder()
            logger.info("the first weights of the run go to the engines whole")
            return self._shipment(DeltaDelivery(staged, None))
        path = staged.folder / DELTA_FILE
        report = await staged.trainer.call(
            "write_delta",
            base=served.stage,
            stage=staged.stage,
            path=str(path),
            base_version=served.version,
            version=staged.version,
        )
        if "error" in report:
            raise WeightsNotWritten.to(path, report["error"])
        delivery = DeltaDelivery(staged, path)
        await delivery.prepare(pool.ready_clients)
        return self._shipment(delivery, is_checked_by_engines=True, num_bytes=report["num_bytes"])

    def _outcome(self, shipment: Shipment) -> Metrics:
        assert isinstance(shipment.delivery, DeltaDelivery)
        return {"weights/is_full_sync": float(shipment.delivery.num_whole > 0)}


class DeltaDelivery(StagedDelivery):
    """A difference on its way.

    Args:
        staged: the weights it leads to.
        path: its file; None when engines are to load all of the weights.
    """

    def __init__(self, staged: Staged, path: Path | None) -> None:
        super().__init__(staged)
        self.num_whole = 0
        self._path = path
        self._prepared: dict[str, int] = {}
        self._of_other_base: set[str] = set()

    async def prepare(self, clients: Sequence[EngineClient]) -> None:
        """Have engines work out the new weights while generation goes on, so that they have only to
        be put in while it is held. An engine that cannot is asked again when it is."""
        await asyncio.gather(*(self._prepare_one(client) for client in clients))

    async def _prepare_one(self, client: EngineClient) -> None:
        try:
            self._prepared[client.url] = await client.weights.prepare_delta(str(self._path))
        except OtherBase as error:
            logger.warning("engine %s gets all weights: %s", client.url, error)
            self._of_other_base.add(client.url)
        except EngineCallError as error:
            logger.info("engine %s works out its weights while held: %s", client.url, error)

    async def deliver(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Outcomes:
        """Every engine applies the difference, or loads all of the weights."""
        return await outcomes_of(self._bring(client, flush_cache) for client in clients)

    async def _bring(self, client: EngineClient, flush_cache: bool) -> None:
        if self._path is not None and client.url not in self._of_other_base:
            prepared = self._prepared.get(client.url)
            try:
                await client.weights.apply_delta(
                    str(self._path), self.staged.version, prepared=prepared
                )
                return
            except OtherBase as error:
                logger.warning("engine %s gets all weights: %s", client.url, error)
        self.num_whole += 1
        await self.staged.load_whole(client, flush_cache=flush_cache)


async def _check_embedded(clients: Sequence[EngineClient]) -> None:
    kinds = await asyncio.gather(*(client.weights.server_info() for client in clients))
    for client, info in zip(clients, kinds, strict=True):
        if not info.is_embedded:
            raise ConfigError(
                "this engine cannot take differences of weights",
                where=f"weights.transport: delta, {client.url}",
                expected="embedded engines (`rollmill serve`)",
                found="an SGLang server",
                fix="set weights.transport to disk or distributed",
            )
