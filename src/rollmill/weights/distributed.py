"""Moving weights from the trainer's memory to the engines' over torch.distributed.

The trainer is rank 0 of a process group, the engines are the ranks after it, and every bucket of
weights is broadcast. No file is written, except for an engine that comes back between two syncs.
The group is made once and made anew when the engines in it change. When an engine dies in
mid-broadcast the others' broadcast fails too: the group is left, and those that live try once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.delivery import Outcomes
from rollmill.engine.errors import EngineCallError
from rollmill.weights.base import Engines, Shipment
from rollmill.weights.group import WeightGroup
from rollmill.weights.staged import Staged, StagedDelivery, StagedTransport

logger = logging.getLogger(__name__)

MAX_TRIES = 2
PROBE_TIMEOUT_S = 5.0


class DistributedTransport(StagedTransport):
    """Weight sync by broadcasts.

    Args:
        config: the section `weights`.
        run_dir: the run's folder.
        dtype: precision that the engines serve.
        backend: `gloo` or `nccl`.
    """

    def __init__(self, config: WeightsConfig, run_dir: Path, *, dtype: str, backend: str) -> None:
        super().__init__(config, run_dir, dtype=dtype)
        self._backend = backend
        self._group: WeightGroup | None = None

    async def close(self) -> None:
        """Leave the group, remove everything from the shared folder."""
        if self._group is not None:
            await self._group.leave()
        await super().close()

    async def _ship(self, pool: Engines, staged: Staged, served: Staged | None) -> Shipment:
        if self._group is None:
            self._group = WeightGroup(staged.trainer, self._config, backend=self._backend)
        return self._shipment(BroadcastDelivery(staged, self._group))


class BroadcastDelivery(StagedDelivery):
    """Weights on their way through a group.

    Args:
        staged: the weights.
        group: of the trainer and the engines.
    """

    def __init__(self, staged: Staged, group: WeightGroup) -> None:
        super().__init__(staged)
        self._group = group

    async def deliver(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Outcomes:
        """One broadcast to all; one more to those that live, when the first fails."""
        errors: dict[str, EngineCallError] = {}
        for _ in range(MAX_TRIES):
            errors |= await _unreachable([c for c in clients if c.url not in errors])
            alive = [client for client in clients if client.url not in errors]
            failed = await self._group.send(self.staged, alive, flush_cache=flush_cache)
            if not failed:
                break
            for url, error in failed.items():
                logger.warning("engine %s did not get version %d by broadcast: %s",
                               url, self.staged.version, error)  # fmt: skip
        else:
            errors |= failed
        return [errors.get(client.url) for client in clients]

    async def renew(self, client: EngineClient) -> None:
        """The engine loads all of the weights; it is in no group any more, as far as we know."""
        self._group.is_whole = False
        await super().renew(client)


async def _unreachable(clients: Sequence[EngineClient]) -> dict[str, EngineCallError]:
    """Engines that do not answer, by URL, with why: nobody is to wait for them in a group."""

    async def probe(client: EngineClient) -> EngineCallError | None:
        try:
            await client.model_info(timeout_s=PROBE_TIMEOUT_S)
        except EngineCallError as error:
            return error
        return None

    outcomes = await asyncio.gather(*(probe(client) for client in clients))
    pairs = zip(clients, outcomes, strict=True)
    return {client.url: error for client, error in pairs if error is not None}
