"""Sending staged weights to engines: what the trainer does for a weight transport.

Rank 0 does it alone while the other ranks go on, so what may fail here (a disk that is full, an
engine that dies) is told as a value: `{"error": why}`. Raised on one rank only, it would end all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rollmill.errors import RollmillError
from rollmill.exchange import groups
from rollmill.exchange.buckets import flatten, specs_of
from rollmill.exchange.specs import plan_buckets
from rollmill.trainer.weight_lender import WeightLender
from rollmill.trainer.weight_store import WeightStore

Report = dict[str, Any]


class WeightSender:
    """The sending half of the weight transports, on one rank.

    Args:
        store: the staged weights.
        is_sender: whether this rank sends; others answer with nothing.
        device: where NCCL works.
    """

    def __init__(self, store: WeightStore, *, is_sender: bool, device: torch.device) -> None:
        self._store = store
        self._is_sender = is_sender
        self._device = device
        self._lender = WeightLender(store, device=device)
        self._meeting: Any = None
        self._address = ""
        self._group: Any = None

    def write(self, stage: int, path: str) -> Report:
        """Write a stage as a folder: `num_bytes`."""
        return self._report(lambda: {"num_bytes": self._store.write(stage, Path(path))})

    def write_delta(
        self, base: int, stage: int, path: str, *, base_version: int, version: int
    ) -> Report:
        """Write what leads from stage `base` to `stage`: `num_bytes`."""

        def write() -> Report:
            num_bytes = self._store.write_delta(
                base, stage, Path(path), base_version=base_version, version=version
            )
            return {"num_bytes": num_bytes}

        return self._report(write)

    def listen(self, address: str, timeout_s: float) -> Report:
        """Open a meeting point for a new group, on a free port of `address`: `port`."""

        def listen() -> Report:
            self.leave()
            self._meeting, port = groups.listen(address, timeout_s)
            self._address = address
            return {"port": port}

        return self._report(listen)

    def join(self, name: str, *, world_size: int, backend: str, timeout_s: float) -> Report:
        """Join the group as rank 0; returns when everybody has."""

        def join() -> Report:
            self._group = groups.join(
                self._meeting,
                name,
                address=self._address,
                rank=0,
                world_size=world_size,
                backend=backend,
                timeout_s=timeout_s,
            )
            return {}

        return self._report(join)

    def broadcast(self, stage: int, *, max_bytes: int, backend: str) -> Report:
        """Send every weight of a stage, in the buckets that `plan_buckets` makes of them.

        When it fails, the group is left, so that nobody waits for this rank any more.
        """

        def send() -> Report:
            weights = self._store.weights(stage)
            for bucket in plan_buckets(specs_of(weights), max_bytes):
                flat = flatten(bucket, weights)
                groups.broadcast(flat.to(self._device) if backend == "nccl" else flat, self._group)
            return {}

        report = self._report(send)
        if "error" in report:
            self.leave()
        return report

    def lend(self, stage: int, number: int, **options: Any) -> Report:
        """Lend one bucket of a stage to engines on this machine; see `WeightLender.lend`."""
        return self._report(lambda: self._lender.lend(stage, number, **options))

    def take_back(self) -> Report:
        """Lend nothing any more."""

        def take_back() -> Report:
            self._lender.take_back()
            return {}

        return self._report(take_back)

    def leave(self) -> Report:
        """Leave the group, if there is one."""
        group, self._group, self._meeting = self._group, None, None

        def leave() -> Report:
            if group is not None:
                groups.leave(group)
            return {}

        return self._report(leave)

    def _report(self, work: Callable[[], Report]) -> Report:
        """What `work` returns; policy: what goes wrong on this rank alone is told, not raised."""
        if not self._is_sender:
            return {}
        try:
            return work()
        except (RollmillError, OSError, SafetensorError, RuntimeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
