"""Which computed prompt prefixes are held, and which of them helps a new prompt most.

Pure bookkeeping: token ids and block numbers; the KV itself lives in `kv.KVStore`. A held prefix
never changes; the least recently used one goes first when room is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that two token arrays share."""
    shorter = min(len(a), len(b))
    if shorter == 0 or a[0] != b[0]:
        return 0
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter


@dataclass(slots=True)
class PrefixIndex:
    """Held prefixes by block number, least recently used first."""

    entries: OrderedDict[int, Tokens] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    _exact: dict[bytes, int] = field(default_factory=dict)

    def add(self, block: int, tokens: Tokens) -> bool:
        """Hold `block`; False when the same tokens are held already."""
        key = tokens.tobytes()
        if key in self._exact:
            return False
        self._exact[key] = block
        self.entries[block] = tokens
        self.num_tokens += len(tokens)
        return True

    def longest(self, tokens: Tokens, limit: int) -> tuple[int | None, int]:
        """The block that shares most leading tokens with `tokens[:limit]`, and how many."""
        exact = self._exact.get(tokens.tobytes()) if limit >= len(tokens) else None
        if exact is not None:
            self.entries.move_to_end(exact)
            return exact, len(tokens)
        best, most = None, 0
        for block, held in self.entries.items():
            shared = common_prefix(held, tokens[:limit])
            if shared > most:
                best, most = block, shared
        if best is not None:
            self.entries.move_to_end(best)
        return best, most

    def pop_oldest(self, keep: int | None = None) -> int | None:
        """Forget the least recently used block but `keep`; its number, or None."""
        for block in self.entries:
            if block != keep:
                self._forget(block)
                return block
        return None

    def clear(self) -> list[int]:
        """Forget all; their block numbers."""
        blocks = list(self.entries)
        for block in blocks:
            self._forget(block)
        return blocks

    def _forget(self, block: int) -> None:
        tokens = self.entries.pop(block)
        del self._exact[tokens.tobytes()]
        self.num_tokens -= len(tokens)
