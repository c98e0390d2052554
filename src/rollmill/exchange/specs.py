"""What weights look like, and how many small ones become few large messages.

Without torch, so that the driver can use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOAD_FORMAT = "flattened_bucket"
"""SGLang's name, in `/update_weights_from_distributed`, for a bucket sent as one run of bytes."""

ITEM_SIZES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""Bytes per element by precision, as torch names it."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight: its name, its precision as torch names it (`bfloat16`), and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size.

        Raises:
            ValueError: an unknown precision.
        """
        size = ITEM_SIZES.get(self.dtype)
        if size is None:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        return math.prod(self.shape) * size


def plan_buckets(specs: Sequence[WeightSpec], max_bytes: int) -> list[list[WeightSpec]]:
    """Weights by bucket, in order within a precision; a bucket holds one precision and at most
    `max_bytes`, or one weight that is larger. Empty weights need no message and are left out."""
    buckets: list[list[WeightSpec]] = []
    open_buckets: dict[str, tuple[list[WeightSpec], int]] = {}
    for spec in specs:
        if not spec.num_bytes:
            continue
        bucket, filled = open_buckets.get(spec.dtype, ([], 0))
        if not bucket or filled + spec.num_bytes > max_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(spec)
        open_buckets[spec.dtype] = bucket, filled + spec.num_bytes
    return buckets
