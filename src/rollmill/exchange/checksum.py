"""Checksums of weights, cheap enough to be taken at every sync.

CRC-32 per weight, so that a difference can be named, and one digest over all of them. It guards
against mistakes and damage, not against an adversary. Measured: 4 GB/s on one core, where a
cryptographic digest takes 0.7 to 1.2 GB/s.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

ALGORITHM = "crc32"
"""Checksums can only be compared with those of the same algorithm."""

Bytes = npt.NDArray[np.uint8]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes; without a copy when it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def checksum_of(tensor: torch.Tensor) -> str:
    """Eight hex digits; equal exactly when the bytes are (but for chance)."""
    return f"{zlib.crc32(bytes_of(tensor).data):08x}"


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The checksum of each weight by its name."""
    return {name: checksum_of(tensor) for name, tensor in tensors.items()}


def total_of(checksums: Mapping[str, str]) -> str:
    """One digest over all checksums and names, whatever their order."""
    joined = "".join(f"{name}={value};" for name, value in sorted(checksums.items()))
    return hashlib.blake2b(joined.encode(), digest_size=8).hexdigest()


def without_ties(items: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Weights that share memory once, under the first of their names."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in items:
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor
    return kept
