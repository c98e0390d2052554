"""An event loop that stays responsive while thousands of connections have something to say.

asyncio handles everything that is readable in one turn. When a batch is aborted, thousands of long
answers arrive at once, and such a turn takes seconds in which nothing else runs. Invariant: one
turn handles at most `EVENTS_PER_TURN` sockets; the others come in the next turns, in order.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Mapping
from typing import Any

EVENTS_PER_TURN = 8
"""Reading what one socket holds takes up to half a millisecond."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop for `asyncio.Runner(loop_factory=new_event_loop)`."""
    return asyncio.SelectorEventLoop(_FairSelector())


class _FairSelector(selectors.BaseSelector):
    """The platform's selector, handing out a few ready files at a time."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self._ready: dict[int, tuple[selectors.SelectorKey, int]] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._inner.unregister(fileobj)
        self._ready.pop(key.fd, None)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._inner.modify(fileobj, events, data)
        self._ready.pop(key.fd, None)  # it comes again if it is still ready
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._ready:
            self._ready = {key.fd: (key, events) for key, events in self._inner.select(timeout)}
        now = list(itertools.islice(self._ready, EVENTS_PER_TURN))
        return [self._ready.pop(descriptor) for descriptor in now]

    def close(self) -> None:
        self._ready.clear()
        self._inner.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()
