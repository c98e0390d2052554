"""What changed between two versions of the weights, as one file.

A weight's change is the XOR of its old and new bits, so applying it gives the new bytes exactly,
whatever the precision. When few elements changed, only those are stored, with the distances
between them; otherwise all are. Either way numbers are stored by byte position (all lowest bytes,
then the next ones, ...), since the upper bytes are mostly zero, and compressed with zlib.

    file    = magic, length of the header (8 bytes, little-endian), header (JSON), streams
    header  = base and target (version and checksums), CRC-32 of the streams, weights
    weight  = precision, shape, number of changed elements, "all" or "some", stream lengths

Invariant: a delta is applied only to the weights it was made from, and what comes out has the
checksums of the version it leads to; anything else is an error and changes nothing.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from rollmill.errors import ModelError
from rollmill.exchange.buckets import specs_of
from rollmill.exchange.checksum import bytes_of, checksum_of, total_of

MAGIC = b"RMDELTA1"
DENSE_SHARE = 0.25
"""Above this share of changed elements, all are stored: distances would cost more than zeros."""
LEVEL = 1
"""zlib's fastest: higher levels gain a few percent and cost several times the time."""

Words = npt.NDArray[np.unsignedinteger]


class Side(msgspec.Struct, frozen=True):
    """One end of a delta: a version, the checksum of every weight of it, and the one of all."""

    version: int
    checksums: dict[str, str]

    @property
    def total(self) -> str:
        """One checksum of all weights."""
        return total_of(self.checksums)


class Change(msgspec.Struct, frozen=True):
    """How one weight changed. `value_lengths` and `gap_lengths`: bytes of each stored stream."""

    dtype: str
    shape: tuple[int, ...]
    num_changed: int
    is_dense: bool
    value_lengths: tuple[int, ...]
    gap_lengths: tuple[int, ...] = ()


class Header(msgspec.Struct, frozen=True):
    """What a delta file says about itself. `changes` lists the weights that changed."""

    base: Side
    target: Side
    streams_crc: int
    changes: dict[str, Change]


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that was read and is not damaged."""

    header: Header
    streams: memoryview


def write_delta(
    path: Path,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    base: Side,
    target: Side,
) -> int:
    """Write the change from `old` to `new`; returns the bytes written.

    The file appears under its name when it is complete.

    Raises:
        ValueError: the two are not versions of the same weights.
    """
    if specs_of(old) != specs_of(new):
        raise ValueError("old and new weights differ in names, shapes or precision")
    changes: dict[str, Change] = {}
    streams: list[bytes] = []
    for name, tensor in new.items():
        encoded = _encode(old[name], tensor)
        if encoded is not None:
            changes[name], parts = encoded
            streams += parts
    crc = 0
    for part in streams:
        crc = zlib.crc32(part, crc)
    header = msgspec.json.encode(Header(base, target, crc, changes))
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as file:
        file.write(MAGIC + struct.pack("<Q", len(header)) + header)
        file.writelines(streams)
    os.replace(aside, path)
    return path.stat().st_size


def read_delta(path: Path) -> Delta:
    """A delta file, read completely and checked for damage.

    Raises:
        ModelError: it is missing, or damaged.
    """
    try:
        data = memoryview(path.read_bytes())
        if bytes(data[: len(MAGIC)]) != MAGIC:
            raise ValueError("it is not a delta file")
        start = len(MAGIC) + 8
        (length,) = struct.unpack("<Q", data[len(MAGIC) : start])
        header = msgspec.json.decode(data[start : start + length], type=Header)
        streams = data[start + length :]
        if zlib.crc32(streams) != header.streams_crc:
            raise ValueError("its checksum is wrong")
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"the delta cannot be read: {error}", where=str(path)) from error
    return Delta(header, streams)


def apply_delta(delta: Delta, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The new values of the weights that change, on the CPU; `weights` stay as they are.

    The caller has made sure that `weights` are those the delta was made from.

    Raises:
        ModelError: the result does not have the checksums of the target, so neither the delta nor
            `weights` can be trusted.
    """
    changed = {}
    start = 0
    for name, change in delta.header.changes.items():
        lengths = (*change.value_lengths, *change.gap_lengths)
        parts = []
        for length in lengths:
            parts.append(delta.streams[start : start + length])
            start += length
        try:
            tensor = _decode(weights[name], change, parts)
        except (KeyError, ValueError, zlib.error) as error:
            raise ModelError(f"the delta of {name} cannot be applied: {error!r}") from error
        if checksum_of(tensor) != delta.header.target.checksums.get(name):
            raise ModelError(f"the delta of {name} does not lead to the promised values")
        changed[name] = tensor
    return changed


def _encode(old: torch.Tensor, new: torch.Tensor) -> tuple[Change, list[bytes]] | None:
    """The change and its streams; None when nothing changed."""
    differs = _words(old) ^ _words(new)
    places = np.flatnonzero(differs)
    if not len(places):
        return None
    is_dense = len(places) > DENSE_SHARE * len(differs)
    values = _pack(differs if is_dense else differs[places])
    gaps = [] if is_dense else _pack(_gaps(places))
    (spec,) = specs_of({"": new})
    change = Change(
        dtype=spec.dtype,
        shape=spec.shape,
        num_changed=len(places),
        is_dense=is_dense,
        value_lengths=tuple(map(len, values)),
        gap_lengths=tuple(map(len, gaps)),
    )
    return change, [*values, *gaps]


def _decode(old: torch.Tensor, change: Change, parts: list[memoryview]) -> torch.Tensor:
    (spec,) = specs_of({"": old})
    if (spec.dtype, spec.shape) != (change.dtype, change.shape):
        raise ValueError(f"the engine's weight is {spec.dtype} {list(spec.shape)}")
    new = old.detach().to("cpu", copy=True).contiguous()
    words = _words(new)  # shares the memory of `new`
    values, gaps = parts[: len(change.value_lengths)], parts[len(change.value_lengths) :]
    if change.is_dense:
        words ^= _unpack(values, len(words), words.dtype)
        return new
    distances = _unpack(gaps, change.num_changed, np.dtype(np.uint64))
    places = np.cumsum(distances.astype(np.int64) + 1) - 1
    if len(places) and not 0 <= places[-1] < len(words):
        raise ValueError("it reaches beyond the end of the weight")
    words[places] ^= _unpack(values, change.num_changed, words.dtype)
    return new


def _gaps(places: npt.NDArray[np.int64]) -> Words:
    """Elements that did not change before each one that did."""
    return (np.diff(places, prepend=-1) - 1).astype(np.uint64)


def _words(tensor: torch.Tensor) -> Words:
    """A weight's elements as unsigned integers of their size."""
    width = tensor.element_size()
    return bytes_of(tensor).view(f"u{width}" if width <= 8 else "u8")


def _pack(words: Words) -> list[bytes]:
    """One compressed stream per byte position, the lowest first; upper ones that are zero are left
    out."""
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.itemsize)
    used = max((i + 1 for i in range(words.itemsize) if planes[:, i].any()), default=0)
    return [zlib.compress(planes[:, i].tobytes(), LEVEL) for i in range(used)]


def _unpack(parts: list[memoryview], length: int, dtype: np.dtype[np.unsignedinteger]) -> Words:
    """`length` words from their streams.

    Raises:
        ValueError: a stream has another length.
    """
    planes = np.zeros((length, dtype.itemsize), np.uint8)
    if len(parts) > dtype.itemsize:
        raise ValueError("too many streams")
    for i, part in enumerate(parts):
        plane = zlib.decompressobj().decompress(part, length + 1)
        if len(plane) != length:
            raise ValueError(f"a stream has another length than {length}")
        planes[:, i] = np.frombuffer(plane, np.uint8)
    return planes.reshape(-1).view(dtype)
