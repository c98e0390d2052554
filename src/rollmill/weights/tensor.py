"""Handing weights over by handle, between a trainer and engines on one machine.

The trainer lends a bucket of weights in its own memory, every engine copies it from there, and the
next bucket follows: no file and no socket carries weights, and no more than one bucket is lent. On
a GPU handles are CUDA's; elsewhere they are of shared memory without a name, which nobody can leave
behind. Embedded engines copy while generation goes on, and use what they copied when it is held.
SGLang uses each bucket as it comes, so it gets them while generation is held, and one that fails in
the middle holds a mixture until it is given whole weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.delivery import Outcomes
from rollmill.engine.server_info import ServerInfo
from rollmill.errors import ConfigError
from rollmill.exchange.machine import is_own_address, machine_name
from rollmill.exchange.specs import WeightSpec, plan_buckets
from rollmill.weights.base import Engines, Shipment
from rollmill.weights.sessions import Failures, begin, discard, for_all, on_all
from rollmill.weights.staged import Staged, StagedDelivery, StagedTransport

logger = logging.getLogger(__name__)


class TensorTransport(StagedTransport):
    """Weight sync by handles of memory."""

    async def _ship(self, pool: Engines, staged: Staged, served: Staged | None) -> Shipment:
        delivery = HandleDelivery(staged, self._config)
        await delivery.prepare(pool.ready_clients)
        return self._shipment(delivery)


class HandleDelivery(StagedDelivery):
    """Weights that are lent to engines.

    Args:
        staged: the weights.
        config: bucket size, timeout, whether checksums are compared.
    """

    def __init__(self, staged: Staged, config: WeightsConfig) -> None:
        super().__init__(staged)
        self._config = config
        self._infos: dict[str, ServerInfo] = {}
        self._prepared: set[str] = set()

    async def prepare(self, clients: Sequence[EngineClient]) -> None:
        """Have embedded engines copy the weights while generation goes on, so that they have only
        to use them when it is held. What fails here is done again then.

        Raises:
            ConfigError: weights cannot be handed to one of the engines.
            RollmillError: the trainer is gone.
        """
        failures = await self._meet(clients)
        met = _without(failures, clients)
        embedded = [client for client in met if self._infos[client.url].is_embedded]
        failures |= await self._hand_over(embedded, flush_cache=False)
        self._prepared = {client.url for client in _without(failures, embedded)}
        for url, error in failures.items():
            logger.info("engine %s gets its weights while held: %s", url, error)

    async def deliver(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Outcomes:
        """Every engine uses the weights, after copying them if it has not yet.

        Raises:
            RollmillError: the trainer is gone; engines keep the old weights.
        """
        late = [client for client in clients if client.url not in self._prepared]
        failures = await self._meet(late)
        failures |= await self._hand_over(_without(failures, late), flush_cache=flush_cache)
        complete = _without(failures, clients)
        ending = [client.weights.end(timeout_s=self._config.timeout_s) for client in complete]
        failures |= await on_all(complete, ending)
        return [failures.get(client.url) for client in clients]

    async def _meet(self, clients: Sequence[EngineClient]) -> Failures:
        """Ask engines what they are; those that do not say.

        Raises:
            ConfigError: weights cannot be handed to one of them, now or ever.
        """

        async def ask(client: EngineClient) -> None:
            info = await client.weights.server_info()
            check_engine(client.url, info)
            self._infos[client.url] = info

        unknown = [client for client in clients if client.url not in self._infos]
        return await on_all(unknown, [ask(client) for client in unknown])

    async def _hand_over(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Failures:
        """Open a session at every engine and have it copy every bucket; one that cannot does not
        hold up the others, and its session is closed."""
        if not clients:
            return {}
        timeout_s = self._config.timeout_s
        failures = await on_all(clients, [begin(client, timeout_s) for client in clients])
        opened = _without(failures, clients)
        complete: list[EngineClient] = []
        try:
            failures |= await self._lend_all(opened, flush_cache=flush_cache)
            complete = _without(failures, opened)
        finally:
            rest = [client for client in opened if client not in complete]
            await on_all(rest, [discard(client, timeout_s) for client in rest])
        # Raises when the trainer is gone, which engines may have seen first.
        await self.staged.trainer.call("take_back_bucket")
        return failures

    async def _lend_all(self, clients: Sequence[EngineClient], *, flush_cache: bool) -> Failures:
        """Lend one bucket after the other to the engines that copied all before it."""
        max_bytes = self._config.bucket_mb << 20
        buckets = plan_buckets(self.staged.specs, max_bytes)
        failures: Failures = {}
        for number, bucket in enumerate(buckets):
            alive = _without(failures, clients)
            if not alive:
                break
            infos = [self._infos[client.url] for client in alive]
            lent = await self.staged.trainer.call(
                "lend_bucket",
                stage=self.staged.stage,
                number=number,
                max_bytes=max_bytes,
                on_gpu=all(info.is_on_gpu for info in infos),
                num_handles=sum(info.is_embedded for info in infos),
                num_pickles=sum(info.tp_size for info in infos if not info.is_embedded),
            )
            if "error" in lent:
                return failures | for_all(alive, lent["error"])
            handles, pickles = iter(lent["handles"]), iter(lent["pickles"])
            version = self.staged.version if number == len(buckets) - 1 else None
            calls = [
                self._copy(client, bucket, next(handles), version)
                if info.is_embedded
                else client.weights.unpickle(
                    list(islice(pickles, info.tp_size)),
                    version=version,
                    flush_cache=flush_cache and version is not None,
                    timeout_s=self._config.timeout_s,
                )
                for client, info in zip(alive, infos, strict=True)
            ]
            failures |= await on_all(alive, calls)
        return failures

    async def _copy(
        self,
        client: EngineClient,
        bucket: Sequence[WeightSpec],
        handle: Mapping[str, Any],
        version: int | None,
    ) -> None:
        """An embedded engine copies one bucket."""
        sums = self.staged.report["checksums"]
        await client.weights.copy(
            bucket,
            handle,
            checksums=[sums[spec.name] for spec in bucket]
            if self._config.verify_checksum
            else None,
            version=version,
            timeout_s=self._config.timeout_s,
        )


def check_engine(url: str, info: ServerInfo) -> None:
    """Raise `ConfigError` when weights cannot be handed to this engine by handle."""
    if info.machine is None:
        is_here = is_own_address(urlsplit(url).hostname or "") and info.nnodes == 1
    else:
        is_here = info.machine == machine_name()
    if not is_here:
        raise ConfigError(
            "an engine is not on the trainer's machine",
            where=f"weights.transport: tensor, {url}",
            expected="trainer and engines on one machine (and in one container)",
            found=info.machine or f"another address, or {info.nnodes} machines",
            fix="set weights.transport to distributed or disk",
        )
    if info.pp_size > 1 or info.dp_size > 1:
        raise ConfigError(
            "SGLang does not take weights by handle in this layout",
            where=f"weights.transport: tensor, {url}",
            expected="pp_size 1 and dp_size 1",
            found=f"pp_size {info.pp_size}, dp_size {info.dp_size}",
            fix="start several servers instead, or set weights.transport to disk",
        )


def _without(failures: Failures, clients: Sequence[EngineClient]) -> list[EngineClient]:
    return [client for client in clients if client.url not in failures]
