"""No full garbage collections while requests are in flight.

Thousands of requests are hundreds of thousands of objects that live for minutes. Python looks
through all of them again and again and finds nothing, and each look stops the event loop for a
tenth of a second and more. What a batch leaves behind is collected when the batch is done.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Young objects are collected as ever; old ones afterwards, when they were due meanwhile."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        is_due = gc.get_count()[2] > old > 0
        gc.set_threshold(young, middle, old)
        if is_due:
            gc.collect()
