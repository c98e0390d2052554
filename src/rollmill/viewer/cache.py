"""A small cache of what was read last, bounded by a total size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SizedCache(Generic[Value]):
    """Keeps the values used last, as long as their sizes sum to at most `max_size`.

    The newest value stays even when it alone is larger. Safe to use from several threads; two
    threads that miss the same key at once both make the value.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._total = 0
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[Value, int]]) -> Value:
        """The value of `key`; `make` gives it with its size when it is not there."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        value, size = make()
        with self._lock:
            if key not in self._entries:
                self._entries[key] = (value, size)
                self._total += size
            while self._total > self._max_size and len(self._entries) > 1:
                _, (_, freed) = self._entries.popitem(last=False)
                self._total -= freed
        return value

    def __len__(self) -> int:
        return len(self._entries)
