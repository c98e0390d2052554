"""What the grading process is doing, readable while it hangs.

Two processes share one page of memory: the grading process writes the number of the task it is
on, when it began and how long it may take; the process above it reads them to enforce the
deadline. A message could sit in a buffer; this cannot.

A limit is in wall time for user functions and programs, which may wait for others. For the built-in
graders, which only compute, it is in processor time, so that a busy machine fails no answer; wall
time may then be up to `PATIENCE` times the limit.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from dataclasses import dataclass

IDLE = -1
OVERLAPPING = -2
STARTING = -3
RECYCLING = -4

PATIENCE = 10.0
WALL = -1.0

_LAYOUT = struct.Struct("<qddd")


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot.

    Attributes:
        number: task number, or IDLE, OVERLAPPING, STARTING, RECYCLING.
        began: monotonic time of its begin.
        limit_s: how long it may take.
        processor_began: processor time of the process at the begin; WALL when wall time counts.
    """

    number: int
    began: float
    limit_s: float
    processor_began: float

    def seconds_left(self, process_id: int) -> float | None:
        """Time until the limit may pass, at most 0 when it has; None while idle."""
        if self.number in (IDLE, RECYCLING):
            return None
        elapsed = time.monotonic() - self.began
        if self.processor_began == WALL or elapsed < self.limit_s:
            return self.limit_s - elapsed
        used = processor_seconds(process_id)
        if used is None:
            return self.limit_s - elapsed
        left = self.limit_s - (used - self.processor_began)
        return min(left, PATIENCE * self.limit_s - elapsed)


class SharedProgress:
    """The shared page. Made before the fork, written below, read above."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.set(IDLE, 0.0)

    def set(self, number: int, limit_s: float, *, is_processor_time: bool = False) -> None:
        """From now on, `number` runs and may take `limit_s`."""
        began = time.process_time() if is_processor_time else WALL
        _LAYOUT.pack_into(self._page, 0, number, time.monotonic(), limit_s, began)

    def detach(self) -> None:
        """Write to a page of one's own from now on."""
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def get(self) -> Progress:
        """The current entry."""
        return Progress(*_LAYOUT.unpack_from(self._page, 0))


def processor_seconds(process_id: int) -> float | None:
    """Processor time that a process of ours has used; None where it cannot be told."""
    if sys.platform != "linux":
        return None
    clock = (~process_id << 3) | 2  # the kernel's number for the process's clock
    try:
        return time.clock_gettime(clock)
    except OSError:
        return None
