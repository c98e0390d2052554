"""New weights to the engines; and whose turn it is when engines and trainer share memory.

Colocated (`engine.offload`), a step goes: rollout → free the engines' memory → train → free the
trainer's memory → engines' weights back → sync → engines' KV cache back → next. At no moment do
both hold theirs, but for the engines' weights during the sync.

An engine that dies in the middle of a sync does not end the run: the sync is made again, without
the engine, which gets the weights when it is back.
"""

from __future__ import annotations

import logging

from rollmill.cluster.ranks import Worker
from rollmill.config import Config
from rollmill.engine.errors import EngineLost, EngineTimeout, EngineUnreachable
from rollmill.engine.pool import EnginePool
from rollmill.weights.base import Transport
from rollmill.weights.swallowed import SwallowWatch

logger = logging.getLogger(__name__)

NUM_TRIES = 3
"""Times that a sync is tried while engines die under it; when none is left it fails at once."""


class WeightSync:
    """Brings the trainer's weights to the engines.

    Args:
        config: the whole configuration.
        trainer: has the weights.
        engines: get them.
        transport: the way between them.

    Attributes:
        version: what the engines serve; -1 before the first sync.
    """

    def __init__(
        self, config: Config, *, trainer: Worker, engines: EnginePool, transport: Transport
    ) -> None:
        self.version = -1
        self._is_colocated = config.engine.offload and config.needs_engines
        self._are_engines_freed = False
        self._trainer = trainer
        self._engines = engines
        self._transport = transport
        self._watch = SwallowWatch(config.engine.embedded.dtype)

    async def make_room_for_trainer(self) -> None:
        """Before training: the engines give up their memory, when they share it."""
        if not self._is_colocated:
            return
        if not self._are_engines_freed:
            await self._engines.release_memory(["kv_cache", "weights"])
            self._are_engines_freed = True
        await self._trainer.call("onload")

    async def bring(self, version: int) -> dict[str, float]:
        """Have the engines serve the trainer's weights as `version`; the transport's metrics."""
        if self._is_colocated:
            await self._trainer.call("offload")
        if self._are_engines_freed:
            await self._engines.resume_memory(["weights"])
        metrics = await sync_again(self._transport, self._trainer, self._engines, version)
        if self._are_engines_freed:
            await self._engines.resume_memory(["kv_cache"])
            self._are_engines_freed = False
        self.version = version
        warning = self._watch.update(metrics.get("weights/changed_share"))
        if warning is not None:
            logger.warning("weights %d: %s", version, warning)
        return metrics


async def sync_again(
    transport: Transport, trainer: Worker, engines: EnginePool, version: int
) -> dict[str, float]:
    """One sync, made again when the engines were lost under it; the transport's metrics.

    Raises:
        EngineError: no engine is left, or they refuse the weights.
    """
    num_failed = 0
    while True:
        try:
            return await transport.sync(trainer, engines, version)
        except (EngineLost, EngineTimeout, EngineUnreachable) as error:
            num_failed += 1
            if num_failed >= NUM_TRIES:
                raise
            logger.warning("weights %d are synced again: %s", version, error)
