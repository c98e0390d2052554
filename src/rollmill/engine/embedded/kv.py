"""Where keys and values live: compact rows for decoding, blocks for prompts.

Rows of one size share one tensor per layer, `[rows, kv_heads, size, head_dim]`, and the rows in
use are always the first ones. So a decoding step attends over plain slices, without copying or
indexing the cache, and a short sequence never pays for a long one. A row that outgrows its size
moves to the next one; when a row leaves, the last row takes its place.

A block holds one prompt prefix, `[kv_heads, length, head_dim]` per layer, and never changes
once computed; a row starts as a copy of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one attention layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers stored per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(slots=True)
class Block:
    """Keys and values of one prompt prefix, by layer: `[kv_heads, length, dim]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def length(self) -> int:
        """Tokens that it holds."""
        return self.keys[0].shape[1] if self.keys else 0


@dataclass(slots=True)
class RowPool:
    """All rows of one size; row `i` belongs to `owners[i]`."""

    size: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    owners: list[Hashable] = field(default_factory=list)
    capacity: int = 0


class KVStore:
    """Rows and blocks of all layers.

    Args:
        shapes: one entry per attention layer.
        dtype: of keys and values.
        device: where they live.
        row_size: the size of the row that holds a given number of tokens.
        max_total_tokens: rows that are not used yet are allocated within it, as far as that goes.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        row_size: Callable[[int], int],
        max_total_tokens: int,
    ) -> None:
        self._shapes = list(shapes)
        self._dtype = dtype
        self._device = device
        self._row_size = row_size
        self._max_total_tokens = max_total_tokens
        self._pools: dict[int, RowPool] = {}
        self._place: dict[Hashable, tuple[RowPool, int]] = {}
        self.blocks: dict[int, Block] = {}

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes over all layers."""
        return kv_bytes_per_token(self._shapes, self._dtype)

    def pools(self) -> list[RowPool]:
        """Pools with rows in use, smallest first: the order of a decoding step."""
        return [self._pools[size] for size in sorted(self._pools) if self._pools[size].owners]

    def new_block(self, block: int, length: int, source: int | None, num_shared: int) -> None:
        """Allocate a block; its first tokens are copied from another one."""
        made = Block(
            [self._empty(s.num_kv_heads, length, s.key_dim) for s in self._shapes],
            [self._empty(s.num_kv_heads, length, s.value_dim) for s in self._shapes],
        )
        if source is not None:
            held = self.blocks[source]
            for to, of in zip(made.keys + made.values, held.keys + held.values, strict=True):
                to[:, :num_shared].copy_(of[:, :num_shared])
        self.blocks[block] = made

    def drop_blocks(self, blocks: Sequence[int]) -> None:
        """Free blocks; unknown ones are ignored."""
        for block in blocks:
            self.blocks.pop(block, None)

    def admit(self, owner: Hashable, num_tokens: int, block: int | None) -> None:
        """Give `owner` a row for `num_tokens`, starting as a copy of `block`'s tokens."""
        pool, row = self._take_row(owner, num_tokens)
        if block is None:
            return
        held = self.blocks[block]
        length = min(num_tokens, held.length)
        for to, of in zip(pool.keys + pool.values, held.keys + held.values, strict=True):
            to[row, :, :length].copy_(of[:, :length])

    def ensure(self, owner: Hashable, num_tokens: int) -> None:
        """Move `owner` to a bigger row when `num_tokens` no longer fit in its own."""
        pool, row = self._place[owner]
        if num_tokens <= pool.size:
            return
        bigger, new_row = self._take_row(owner, num_tokens)
        for to, of in zip(bigger.keys + bigger.values, pool.keys + pool.values, strict=True):
            to[new_row, :, : pool.size].copy_(of[row])
        self._vacate(pool, row)

    def save_row(self, owner: Hashable, block: int, length: int) -> None:
        """Make a block of the first tokens of `owner`'s row."""
        pool, row = self._place[owner]
        self.blocks[block] = Block(
            [keys[row, :, :length].clone() for keys in pool.keys],
            [values[row, :, :length].clone() for values in pool.values],
        )

    def drop_rows(self, owners: Sequence[Hashable]) -> None:
        """Free the rows of `owners`; those without a row are ignored."""
        places = [self._place.pop(owner) for owner in owners if owner in self._place]
        # Last rows first: then rows that leave together are not moved for each other.
        for pool, row in sorted(places, key=lambda place: -place[1]):
            self._vacate(pool, row)

    def release(self) -> None:
        """Free everything."""
        self._pools.clear()
        self._place.clear()
        self.blocks.clear()

    def _take_row(self, owner: Hashable, num_tokens: int) -> tuple[RowPool, int]:
        size = self._row_size(num_tokens)
        pool = self._pools.setdefault(size, RowPool(size))
        row = len(pool.owners)
        if row == pool.capacity:
            self._resize(pool, self._grown_capacity(pool))
        pool.owners.append(owner)
        self._place[owner] = (pool, row)
        return pool, row

    def _vacate(self, pool: RowPool, row: int) -> None:
        last = len(pool.owners) - 1
        moved = pool.owners.pop()
        if row == last:
            return
        for tensor in pool.keys + pool.values:
            tensor[row].copy_(tensor[last])
        pool.owners[row] = moved
        self._place[moved] = (pool, row)

    def _grown_capacity(self, pool: RowPool) -> int:
        """Rows that a full pool should have: twice as many or what there is room for, but a quarter
        more in any case, as growing copies them all. Unused rows of other pools make room."""
        wanted = max(8, 2 * pool.capacity) - pool.capacity
        if self._num_allocated() + wanted * pool.size > self._max_total_tokens:
            for other in self._pools.values():
                if other.capacity > len(other.owners):
                    self._resize(other, len(other.owners))
        in_blocks = sum(block.length for block in self.blocks.values())
        room = self._max_total_tokens - self._num_allocated() - in_blocks
        return pool.capacity + max(1, pool.capacity // 4, min(wanted, room // pool.size))

    def _num_allocated(self) -> int:
        """Tokens of all rows, used and unused."""
        return sum(pool.size * pool.capacity for pool in self._pools.values())

    def _resize(self, pool: RowPool, capacity: int) -> None:
        used = len(pool.owners)
        first = not pool.keys
        for index, shape in enumerate(self._shapes):
            for tensors, dim in ((pool.keys, shape.key_dim), (pool.values, shape.value_dim)):
                grown = self._empty(capacity, shape.num_kv_heads, pool.size, dim)
                if first:
                    tensors.append(grown)
                else:
                    grown[:used].copy_(tensors[index][:used])
                    tensors[index] = grown
        pool.capacity = capacity

    def _empty(self, *shape: int) -> torch.Tensor:
        # Zeros, not garbage: masked positions are multiplied by zero, and 0 x NaN is NaN.
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def kv_bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    return sum(shape.numbers_per_token for shape in shapes) * dtype.itemsize
