"""A bucket of weights as SGLang's `/update_weights_from_tensor` takes it (`flattened_bucket`).

SGLang wants the output of torch's `ForkingPickler`: where the tensor lies, and what lies in it. We
write such pickles and never read one. SGLang reads each exactly once, allows few classes in it and
wants a GPU by its UUID, since processes number GPUs differently.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from rollmill.exchange.buckets import dtype_of
from rollmill.exchange.specs import WeightSpec

DEVICE_ARGUMENT = 6
"""Where torch's `rebuild_cuda_tensor` takes the number of the GPU; SGLang takes its UUID there."""


def pickle_bucket(bucket: Sequence[WeightSpec], flat: torch.Tensor) -> str:
    """A pickle for one rank of SGLang, in base64; `flat` must stay until it was read.

    On the CPU the memory of `flat` is moved into a file of shared memory, under torch's strategy
    `file_system`: it goes when both sides have let go of it, or are gone.
    """
    metadata = []
    start = 0
    for spec in bucket:
        end = start + spec.num_bytes
        metadata.append(
            SimpleNamespace(
                name=spec.name,
                shape=torch.Size(spec.shape),
                dtype=dtype_of(spec.dtype),
                start_idx=start,
                end_idx=end,
                numel=spec.num_bytes,
            )
        )
        start = end
    written = io.BytesIO()
    with _file_system_strategy():
        _Pickler(written).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(written.getvalue()).decode()


@contextmanager
def _file_system_strategy() -> Iterator[None]:
    """The other strategy, by descriptors, works between processes of one parent only."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
