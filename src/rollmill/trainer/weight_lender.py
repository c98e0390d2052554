"""Lending staged weights to engines on this machine, one bucket after the other.

What is lent stays until the next bucket is asked for or all is taken back, so the caller asks when
every engine has said that it has copied the last one. At most one bucket is lent at a time, in
each of the forms that engines need.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from rollmill.exchange.buckets import flatten, specs_of
from rollmill.exchange.handles import Handle, LentMemory, lend_cuda
from rollmill.exchange.specs import WeightSpec, plan_buckets
from rollmill.trainer.weight_pickles import pickle_bucket
from rollmill.trainer.weight_store import WeightStore

Report = dict[str, Any]


class WeightLender:
    """Buckets of staged weights, lent by handle.

    Args:
        store: the staged weights, on the CPU.
        device: where this rank trains.
    """

    def __init__(self, store: WeightStore, *, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._memory: LentMemory | None = None
        self._flat: torch.Tensor | None = None

    def lend(
        self,
        stage: int,
        number: int,
        *,
        max_bytes: int,
        on_gpu: bool,
        num_handles: int,
        num_pickles: int,
    ) -> Report:
        """Lend one of the buckets that `plan_buckets` makes of a stage.

        Args:
            stage: the stage.
            number: which bucket, from 0.
            max_bytes: of a bucket.
            on_gpu: as GPU memory, when this rank trains on one; else as CPU memory.
            num_handles: embedded engines that get it.
            num_pickles: ranks of SGLang that get it.

        Returns:
            `handles` and `pickles`: one for each that gets it.
        """
        if number == 0:
            self.take_back()  # what a sync that was cancelled left lent
        self._flat = None  # first, so that there are never two
        weights = self._store.weights(stage)
        buckets = plan_buckets(specs_of(weights), max_bytes)
        bucket = buckets[number]
        is_on_gpu = on_gpu and self._device.type == "cuda"
        handles: list[Handle] = []
        if num_handles and not is_on_gpu:
            handles = [self._fill(buckets, bucket, weights)] * num_handles
        pickles: list[str] = []
        if num_pickles or is_on_gpu:
            flat = flatten(bucket, weights)
            self._flat = flat = flat.to(self._device) if is_on_gpu else flat
            pickles = [pickle_bucket(bucket, flat) for _ in range(num_pickles)]
            if is_on_gpu:
                handles = [lend_cuda(flat) for _ in range(num_handles)]
        return {"handles": [msgspec.to_builtins(one) for one in handles], "pickles": pickles}

    def take_back(self) -> None:
        """Lend nothing any more."""
        was_on_gpu = self._flat is not None and self._flat.is_cuda
        self._flat = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if was_on_gpu:  # an engine on this GPU wants the room
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _fill(
        self,
        buckets: list[list[WeightSpec]],
        bucket: list[WeightSpec],
        weights: dict[str, torch.Tensor],
    ) -> Handle:
        """Put the bucket into memory that is made once, as large as the largest; its handle."""
        if self._memory is None:
            self._memory = LentMemory(max(map(_size_of, buckets)))
        num_bytes = _size_of(bucket)
        flatten(bucket, weights, out=self._memory.tensor[:num_bytes])
        return self._memory.handle(num_bytes)


def _size_of(bucket: list[WeightSpec]) -> int:
    return sum(spec.num_bytes for spec in bucket)
