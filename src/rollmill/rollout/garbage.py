"""Only small garbage collections while requests are in flight.

Thousands of requests are a million objects that live for minutes. Python looks through all of them
again and again and finds nothing, and each look stops the event loop for a tenth of a second and
more. So only the youngest objects are looked through, a few at a time: 100,000 of them take 40 ms.
What a batch leaves behind is collected when the batch is done.

The thresholds belong to the whole process: of batches that overlap (two runs in one process) the
first one in changes them and the last one out puts them back.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30
YOUNG = 20_000
"""New objects that make a collection due: it takes less than 10 ms."""
_before: list[tuple[int, int, int]] = []
"""The thresholds that each batch under way found; the first found the process's own."""


@contextmanager
def only_small_collections() -> Iterator[None]:
    """Young objects are collected as ever; older ones afterwards, when they were due meanwhile."""
    found = gc.get_threshold()
    _before.append(found)
    gc.set_threshold(min(found[0], YOUNG), NEVER, NEVER)
    try:
        yield
    finally:
        own = _before[0]
        _before.pop()
        if not _before:
            _collect_what_was_due(own)


def _collect_what_was_due(thresholds: tuple[int, int, int]) -> None:
    young, middle, old = thresholds
    _, num_young, num_middle = gc.get_count()
    gc.set_threshold(young, middle, old)
    if num_young > middle > 0:
        gc.collect(2 if num_middle > old > 0 else 1)
