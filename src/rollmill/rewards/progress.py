"""What the grading process is doing, readable while it hangs.

Two processes share one page of memory: the grading process writes the number of the task it is
on, when it began and how long it may take; the process above it reads them to enforce the
deadline. A message could sit in a buffer; this cannot.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

IDLE = -1
OVERLAPPING = -2
STARTING = -3

_LAYOUT = struct.Struct("<qdd")


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot: task number (or IDLE, OVERLAPPING, STARTING), begin and limit in seconds."""

    number: int
    began: float
    limit_s: float

    @property
    def deadline(self) -> float | None:
        """Monotonic time at which the limit passes; None while idle."""
        return None if self.number == IDLE else self.began + self.limit_s


class SharedProgress:
    """The shared page. Made before the fork, written below, read above."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.set(IDLE, 0.0)

    def set(self, number: int, limit_s: float) -> None:
        """From now on, `number` runs and may take `limit_s`."""
        _LAYOUT.pack_into(self._page, 0, number, time.monotonic(), limit_s)

    def get(self) -> Progress:
        """The current entry."""
        return Progress(*_LAYOUT.unpack_from(self._page, 0))
