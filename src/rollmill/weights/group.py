"""The process group of the trainer and the engines, and one broadcast through it.

Invariants: a call that raises or reports a failure leaves no group behind; nobody waits longer than
`weights.timeout_s` for somebody who does not come.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Coroutine, Sequence
from typing import Any

from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineCallError, EngineFailed
from rollmill.exchange.specs import WeightSpec, plan_buckets
from rollmill.weights.base import Trainer
from rollmill.weights.sessions import Failures, begin, discard, for_all, on_all
from rollmill.weights.staged import Staged

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 5.0
"""How long anybody is waited for that is told to leave: it may be busy, or gone."""


class WeightGroup:
    """A group of the trainer (rank 0) and engines; made when it is needed.

    Args:
        trainer: rank 0.
        config: address, bucket size, timeout.
        backend: `gloo` or `nccl`.

    Attributes:
        is_whole: the group can be used again; set it to False when an engine in it was lost.
    """

    def __init__(self, trainer: Trainer, config: WeightsConfig, *, backend: str) -> None:
        self.is_whole = False
        self._trainer = trainer
        self._config = config
        self._backend = backend
        self._name = ""
        self._members: list[EngineClient] = []
        self._numbers = itertools.count()

    async def send(
        self, staged: Staged, clients: Sequence[EngineClient], *, flush_cache: bool
    ) -> Failures:
        """Broadcast staged weights to these engines; why it failed, by engine.

        Engines that are not named have the new weights. When there are failures, every engine is
        named: embedded ones then have their old weights.
        """
        if not clients:
            return {}
        failures = await self._ensure(clients)
        if not failures:
            self.is_whole = False  # until it is known that everybody came through
            failures = await self._broadcast(staged, clients, flush_cache=flush_cache)
        if failures:
            await self.leave()
            left_out = EngineFailed("the broadcast failed for another engine")
            return {client.url: failures.get(client.url, left_out) for client in clients}
        self.is_whole = True
        return {}

    async def leave(self) -> None:
        """Everybody leaves the group, as far as they can be reached."""
        members, self._members = self._members, []
        self.is_whole = False
        if not members:
            return
        name = self._name
        leaving = self._trainer.call("leave_weight_group")
        await asyncio.gather(
            # it may be in the middle of a step; what it is told afterwards comes after this
            asyncio.wait_for(leaving, LEAVE_TIMEOUT_S),
            *(client.weights.leave_group(name, timeout_s=LEAVE_TIMEOUT_S) for client in members),
            return_exceptions=True,  # whoever is gone has left; whoever did not join cannot
        )

    async def _ensure(self, clients: Sequence[EngineClient]) -> Failures:
        """Make the group anew unless it is whole and of exactly these engines."""
        if self.is_whole and [c.url for c in self._members] == [c.url for c in clients]:
            return {}
        await self.leave()
        self._name = f"rollmill-{os.getpid()}-{next(self._numbers)}"
        self._members = list(clients)
        infos = await asyncio.gather(*(client.weights.server_info() for client in clients))
        sizes = [info.num_ranks for info in infos]
        offsets = [1 + total for total in itertools.accumulate(sizes, initial=0)]
        timeout_s = self._config.timeout_s
        opened = await self._trainer.call(
            "open_weight_group", address=self._config.address, timeout_s=timeout_s
        )
        if "error" in opened:
            return for_all(clients, opened["error"])
        joining = [
            client.weights.join_group(
                self._name,
                address=self._config.address,
                port=opened["port"],
                rank=offset,
                world_size=offsets[-1],
                backend=self._backend,
                timeout_s=timeout_s,
            )
            for client, offset in zip(clients, offsets, strict=False)
        ]
        joined = self._trainer.call(
            "join_weight_group",
            name=self._name,
            world_size=offsets[-1],
            backend=self._backend,
            timeout_s=timeout_s,
        )
        failures = await _together(joined, clients, joining)
        logger.info("group %s of the trainer and %d engines", self._name, len(clients))
        return failures

    async def _broadcast(
        self, staged: Staged, clients: Sequence[EngineClient], *, flush_cache: bool
    ) -> Failures:
        max_bytes = self._config.bucket_mb << 20
        buckets = plan_buckets(staged.specs, max_bytes)
        timeout_s = self._config.timeout_s
        failures = await on_all(clients, [begin(client, timeout_s) for client in clients])
        if failures:
            return failures
        receiving = [
            self._receive(client, buckets, staged.version, flush_cache=flush_cache)
            for client in clients
        ]
        sent = self._trainer.call(
            "broadcast_weights", stage=staged.stage, max_bytes=max_bytes, backend=self._backend
        )
        failures = await _together(sent, clients, receiving)
        if failures:
            await on_all(clients, [discard(client, timeout_s) for client in clients])
            return failures
        return await on_all(
            clients, [client.weights.end(timeout_s=timeout_s) for client in clients]
        )

    async def _receive(
        self,
        client: EngineClient,
        buckets: Sequence[Sequence[WeightSpec]],
        version: int,
        *,
        flush_cache: bool,
    ) -> None:
        """One engine takes every bucket; when it cannot, it leaves, so that nobody waits for it."""
        try:
            for number, bucket in enumerate(buckets):
                is_last = number == len(buckets) - 1
                await client.weights.receive(
                    bucket,
                    self._name,
                    version=version if is_last else None,
                    flush_cache=flush_cache and is_last,
                    timeout_s=self._config.timeout_s,
                )
        except EngineCallError:
            leaving = client.weights.leave_group(self._name, timeout_s=LEAVE_TIMEOUT_S)
            await asyncio.gather(leaving, return_exceptions=True)
            raise


async def _together(
    trainers: Coroutine[Any, Any, Any],
    clients: Sequence[EngineClient],
    calls: Sequence[Coroutine[Any, Any, None]],
) -> Failures:
    """The trainer's part and the engines' at the same time; both end, whatever happens to one.

    Raises:
        RollmillError: the trainer is gone.
    """
    trainer_task = asyncio.ensure_future(trainers)
    try:
        failures = await on_all(clients, calls)
        report = await trainer_task
    finally:
        trainer_task.cancel()
        await asyncio.gather(trainer_task, return_exceptions=True)
    if "error" in report:
        return for_all(clients, report["error"]) | failures
    return failures
