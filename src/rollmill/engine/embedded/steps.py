"""What the scheduler decides and the model runner carries out: plain values.

A step is complete: whoever carries it out needs nothing else from the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.engine.embedded.prefixes import Tokens
from rollmill.engine.embedded.sequence import Sequence

SMALLEST_ROW = 128
"""Tokens in the smallest row; the next sizes double it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that the scheduler must keep within."""

    max_running: int
    max_total_tokens: int
    chunk_tokens: int
    context_length: int
    holds_prefixes: bool = True
    """Whether finished sequences stay held too, not only prompts."""

    def row_size(self, num_tokens: int) -> int:
        """Tokens reserved for a row that must hold `num_tokens`: a power of two times 128."""
        size = SMALLEST_ROW
        while size < num_tokens:
            size *= 2
        return min(size, max(self.context_length, num_tokens))


@dataclass(slots=True)
class Fill:
    """A prefill in progress: `done` of `tokens` are computed in block `block`."""

    sequence: Sequence
    block: int
    tokens: Tokens
    done: int

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are computed."""
        return self.done >= len(self.tokens)


@dataclass(frozen=True, slots=True)
class DroppedRow:
    """A row that is given up; its first `length` tokens are kept in block `saved_as`, if any."""

    sequence: Sequence
    saved_as: int | None = None
    length: int = 0


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to allocate; its first `num_shared` tokens are copied from block `source`."""

    block: int
    length: int
    source: int | None
    num_shared: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that gets a row; its context is copied from `block` (None: it has none)."""

    sequence: Sequence
    block: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + count)` of a fill to compute in this step."""

    fill: Fill
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step, to be carried out in the order of the fields."""

    dropped_rows: tuple[DroppedRow, ...]
    new_blocks: tuple[NewBlock, ...]
    admissions: tuple[Admission, ...]
    dropped_blocks: tuple[int, ...]
    decode: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    finished: tuple[Sequence, ...]
    """Sequences that want no new token and whose prompt needs no (more) computing."""

    @property
    def has_work(self) -> bool:
        """Whether the model must run."""
        return bool(self.decode or self.chunks)
