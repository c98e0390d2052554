"""Which computed prefixes are held, and which of them helps a new prompt most.

Pure bookkeeping: token ids and block numbers; the KV itself lives in `kv.KVStore`. A held prefix
never changes; the least recently used one goes first when room is needed.

Prefixes are found through a chain of hashes over runs of 16 tokens, so a search costs as much as
the prompt is long, however many prefixes are held. What is found is then compared token by
token: a hash collision can only make a match shorter, never wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

_RUN = 16


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
    _by_run: dict[int, dict[int, None]] = field(default_factory=dict)

    def add(self, block: int, tokens: Tokens) -> bool:
        """Hold `block`; False when the same tokens are held already."""
        key = tokens.tobytes()
        if key in self._exact:
            return False
        self._exact[key] = block
        self.entries[block] = tokens
        self.num_tokens += len(tokens)
        for link in _chain(tokens):
            self._by_run.setdefault(link, {})[block] = None
        return True

    def longest(self, tokens: Tokens, limit: int) -> tuple[int | None, int]:
        """A block that shares most leading tokens with `tokens[:limit]`, and how many.

        Exact for a prefix that is held as it is; else to within 15 tokens.
        """
        exact = self._exact.get(tokens.tobytes()) if limit >= len(tokens) else None
        if exact is not None:
            self.entries.move_to_end(exact)
            return exact, len(tokens)
        best = None
        for link in _chain(tokens[:limit]):
            blocks = self._by_run.get(link)
            if not blocks:
                break
            best = next(reversed(blocks))
        if best is None:
            return None, 0
        shared = common_prefix(self.entries[best], tokens[:limit])
        self.entries.move_to_end(best)
        return (best, shared) if shared else (None, 0)

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
        for link in _chain(tokens):
            blocks = self._by_run[link]
            del blocks[block]
            if not blocks:
                del self._by_run[link]


def _chain(tokens: Tokens) -> Iterator[int]:
    """One hash per full run of tokens, each standing for all tokens up to its run's end."""
    link = 0
    for start in range(0, len(tokens) - _RUN + 1, _RUN):
        link = hash((link, tokens[start : start + _RUN].tobytes()))
        yield link
