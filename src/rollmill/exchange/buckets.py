"""Buckets: weights of one precision, one after the other, as one flat run of bytes.

Each weight can be used where it lies. The layout is SGLang's `flattened_bucket`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rollmill.exchange.specs import WeightSpec


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[WeightSpec]:
    """The specs of these weights, in their order."""
    return [
        WeightSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def dtype_of(name: str) -> torch.dtype:
    """The precision of this name.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def flatten(
    bucket: Sequence[WeightSpec],
    tensors: Mapping[str, torch.Tensor],
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The bucket's bytes: uint8, one dimension; in `out`, if given, which has that size."""
    parts = [tensors[spec.name].contiguous().reshape(-1).view(torch.uint8) for spec in bucket]
    return torch.cat(parts, out=out)


def unflatten(bucket: Sequence[WeightSpec], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of a bucket, as views of its bytes.

    Raises:
        ValueError: the bytes are not the bucket's, or a weight does not lie where its precision
            needs it to (precisions were mixed).
    """
    if flat.numel() != sum(spec.num_bytes for spec in bucket):
        raise ValueError(f"the bucket has {flat.numel()} bytes, not what its weights need")
    tensors = {}
    start = 0
    for spec in bucket:
        dtype, end = dtype_of(spec.dtype), start + spec.num_bytes
        if start % dtype.itemsize:
            raise ValueError(f"{spec.name} does not lie at a multiple of {dtype.itemsize} bytes")
        tensors[spec.name] = flat[start:end].view(dtype).view(spec.shape)
        start = end
    return tensors
