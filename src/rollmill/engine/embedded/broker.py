"""News from the model's thread to the coroutines that wait for it.

The model's thread makes one call into the event loop per step, whatever the number of requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollmill.engine.embedded.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence had `count` output tokens; `is_end`: and there will be no more."""

    count: int
    is_end: bool


@dataclass(slots=True)
class Broker:
    """Queues of progress by sequence."""

    loop: asyncio.AbstractEventLoop
    _queues: dict[Sequence, asyncio.Queue[Progress]] = field(default_factory=dict)

    def subscribe(self, sequence: Sequence) -> asyncio.Queue[Progress]:
        """The queue that receives a sequence's progress; call before submitting it."""
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        self._queues[sequence] = queue
        return queue

    def unsubscribe(self, sequence: Sequence) -> None:
        """Drop the queue."""
        self._queues.pop(sequence, None)

    def notify(self, sequences: list[Sequence]) -> None:
        """From the model's thread: pass on where these sequences are now."""
        news = [(s, Progress(len(s.output), s.finish_reason is not None)) for s in sequences]
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: list[tuple[Sequence, Progress]]) -> None:
        for sequence, progress in news:
            queue = self._queues.get(sequence)
            if queue is not None:
                queue.put_nowait(progress)
