"""The pool of grading workers, seen from the run's event loop.

Answers wait in one queue; each worker holds a small chunk of it. The event loop only moves bytes:
no grading, no waiting for a process. The invariants:

- every submitted task ends in exactly one way: outcomes, cancellation, or the pool's own error;
- one answer costs at most its time limit; the worker that hung is replaced (see `worker.py`);
- a cancelled call leaves nothing to clean up: its task is skipped, or its outcome dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from rollmill.errors import RewardError
from rollmill.rewards.outcome import Outcome
from rollmill.rewards.protocol import Batch, Envelope, Results, Setup, Task, encode, encode_task
from rollmill.rewards.slot import Slot

logger = logging.getLogger(__name__)

MAX_CHUNK = 16
MAX_CHUNK_BYTES = 1 << 20
MAX_OVERLAPPING = 64
"""Coroutines of user functions in flight per worker."""
MAX_DELIVERIES = 2
"""Times a task is given to a worker that then dies as a whole, before it counts as an error."""


@dataclass(slots=True)
class _Entry:
    number: int
    task: Task
    future: asyncio.Future[list[Outcome]]
    deliveries: int = 0


class WorkerPool:
    """`num_workers` grading workers behind one queue.

    Args:
        setup: what the workers load and how they grade.
        num_workers: processes that grade at the same time.
    """

    def __init__(self, setup: Setup, num_workers: int) -> None:
        self._slots = [Slot(number, setup, self) for number in range(num_workers)]
        self._queue: deque[_Entry] = deque()
        self._held: dict[int, _Entry] = {}
        self._numbers: Iterator[int] = itertools.count()
        self._concurrent: frozenset[str] = frozenset()
        self._dispatch_handle: asyncio.Handle | None = None
        self._broken: RewardError | None = None

    async def start(self) -> None:
        """Start all workers and load all graders.

        Raises:
            RollmillError: a grader cannot be loaded, or a worker cannot be started.
        """
        try:
            # All must have started or failed before they can be closed.
            ready = await asyncio.gather(
                *(slot.start() for slot in self._slots), return_exceptions=True
            )
            for one in ready:
                if isinstance(one, BaseException):
                    raise one
                self._concurrent = self._concurrent.union(one)
        except BaseException:
            await self.close()
            raise

    async def submit(self, task: Task) -> list[Outcome]:
        """The outcomes of a task, one per answer in it.

        Raises:
            RewardError: the pool is closed or no worker can be started any more.
        """
        if self._broken is not None:
            raise self._broken
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self._queue.append(_Entry(next(self._numbers), task, future))
        self._dispatch_soon()
        return await future

    async def close(self) -> None:
        """Stop all workers; calls that still wait get a RewardError."""
        if self._dispatch_handle is not None:
            self._dispatch_handle.cancel()
        self.fail_all(RewardError("the reward workers were shut down"))
        await asyncio.gather(*(slot.close() for slot in self._slots))

    def process_ids(self) -> list[int]:
        """Ids of the running worker processes."""
        return [slot.process_id for slot in self._slots if slot.process_id is not None]

    # What slots call.

    def on_results(self, slot: Slot, message: Results) -> None:
        """A worker finished some of its tasks."""
        for result in message.results:
            slot.outstanding.discard(result.number)
            entry = self._held.pop(result.number, None)
            if entry is not None and not entry.future.done():
                entry.future.set_result(result.outcomes)
        if not self._concurrent.issuperset(message.concurrent):
            self._concurrent = self._concurrent.union(message.concurrent)
        self._dispatch_soon()

    def on_lost(self, slot: Slot) -> None:
        """A worker died as a whole: its tasks go back to the front of the queue."""
        for number in sorted(slot.outstanding, reverse=True):
            entry = self._held.pop(number, None)
            if entry is None or entry.future.done():
                continue
            if entry.deliveries >= MAX_DELIVERIES:
                lost = Outcome.error("the reward worker died while it held this answer")
                entry.future.set_result([lost] * len(entry.task.inputs))
            else:
                self._queue.appendleft(entry)
        slot.outstanding.clear()

    def on_restarted(self) -> None:
        """A worker is back."""
        self._dispatch_soon()

    def fail_all(self, error: RewardError) -> None:
        """No worker will come back: everything that waits gets `error`."""
        self._broken = self._broken or error
        for entry in itertools.chain(self._queue, self._held.values()):
            if not entry.future.done():
                entry.future.set_exception(error)
        self._queue.clear()
        self._held.clear()

    # Dispatch.

    def _dispatch_soon(self) -> None:
        """Once per turn of the event loop, so that a burst of answers is cut in even chunks."""
        if self._dispatch_handle is None:
            loop = asyncio.get_running_loop()
            self._dispatch_handle = loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_handle = None
        for slot in sorted(self._slots, key=lambda one: len(one.outstanding)):
            chunk = self._next_chunk(slot)
            if chunk:
                slot.send(encode(Batch(chunk)))

    def _next_chunk(self, slot: Slot) -> list[Envelope]:
        """Tasks for a worker, encoded only now, so that a burst of calls costs little at once."""
        if not slot.is_ready:
            return []
        fair = -(-len(self._queue) // (2 * len(self._slots)))
        room = min(MAX_CHUNK, fair) if not slot.outstanding else 0
        chunk: list[Envelope] = []
        num_bytes = 0
        while self._queue and num_bytes < MAX_CHUNK_BYTES:
            entry = self._queue[0]
            limit = MAX_OVERLAPPING if entry.task.grader in self._concurrent else room
            if entry.future.done():
                self._queue.popleft()
                continue
            if len(slot.outstanding) >= limit:
                break
            self._queue.popleft()
            try:
                body = encode_task(entry.task)
            except Exception as error:  # noqa: BLE001  (policy: this answer's error, not the pool's)
                unsent = Outcome.error(f"the label or metadata cannot be sent: {error!r}")
                entry.future.set_result([unsent] * len(entry.task.inputs))
                continue
            entry.deliveries += 1
            self._held[entry.number] = entry
            slot.outstanding.add(entry.number)
            num_bytes += len(body)
            chunk.append(Envelope(entry.number, len(entry.task.inputs), msgspec.Raw(body)))
        return chunk
