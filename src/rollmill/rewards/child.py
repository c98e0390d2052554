"""The process that grades: it may hang, crash or be killed at any moment.

It gets ready as far as it can without running anything of the user's, and waits for `Begin`. Then
it reads tasks from a socket, grades them and writes results. What it is on stands in the shared
page (`progress.py`), so that the process above can tell the culprit when it has to kill. It holds
no state that matters: a task that was sent and not answered is sent again to its successor.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Never

from rollmill.config.reward import RewardConfig
from rollmill.errors import RollmillError
from rollmill.rewards.functions import CustomReward, is_function_path
from rollmill.rewards.graders.base import Grader
from rollmill.rewards.judging import call_coroutine_function, call_function, judge_with
from rollmill.rewards.limits import die_with_parent, limit_memory, resident_bytes
from rollmill.rewards.outcome import Outcome
from rollmill.rewards.progress import IDLE, OVERLAPPING, RECYCLING, SharedProgress
from rollmill.rewards.protocol import (
    Batch,
    Begin,
    Envelope,
    FrameBuffer,
    Ready,
    Result,
    Results,
    Setup,
    SetupFailed,
    Task,
    decode_task,
    decode_to_worker,
    encode,
    framed,
)
from rollmill.rewards.registry import GraderTable, base_type
from rollmill.rewards.warm import get_ready

LOAD_LIMIT_S = 120.0
"""Time in which graders, and modules of user functions, must be loaded."""
FLUSH_S = 0.002
HEARTBEAT_S = 0.2
READ_BYTES = 1 << 18
RETIRE_CHECK_EVERY = 32


def run_child(setup: Setup, sock: socket.socket, progress: SharedProgress, parent: int) -> None:
    """Grade until the socket closes. Called right after the fork; never returns normally."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    sys.set_int_max_str_digits(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(_Child(setup, sock, progress).serve())


class _Child:
    def __init__(self, setup: Setup, sock: socket.socket, progress: SharedProgress) -> None:
        self._config = RewardConfig.model_validate_json(setup.config)
        self._setup = setup
        self._sock = sock
        self._progress = progress
        self._table = GraderTable(self._config, base_dir=Path(setup.base_dir), seed=setup.seed)
        self._finished: list[Result] = []
        self._last_flush = 0.0
        self._learned: set[str] = set()
        self._overlapping: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._num_graded = 0
        self._num_unchecked = 0
        self._must_retire = False
        self._retiring: asyncio.Task[None] | None = None
        self._process_id = os.getpid()
        os.register_at_fork(after_in_child=self._let_go)
        self._fat_bytes = resident_bytes() + (self._config.worker_memory_mb << 20) // 2

    async def serve(self) -> None:
        self._sock.setblocking(False)
        get_ready(self._table, self._setup.graders)
        buffer = FrameBuffer()
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._sock, READ_BYTES):
            if self._retiring is not None:
                await self._retiring
            for frame in buffer.feed(data):
                message = decode_to_worker(frame)
                if isinstance(message, Begin) and not await self._begin():
                    return
                if isinstance(message, Batch):
                    await self._grade(message)
            await self._flush()
            await self._retire_if_fat()

    async def _begin(self) -> bool:
        """Load all graders, the user's functions among them, and limit the memory."""
        try:
            loaded = {
                name: self._table.get(name, per_group=self._per_group(name))
                for name in self._setup.graders
            }
        except RollmillError as error:
            failed = SetupFailed(type(error).__name__, error.what, dict(error.parts()))
            await self._send(encode(failed))
            return False
        concurrent = [name for name, grader in loaded.items() if _is_async(grader)]
        limit_memory(self._config.worker_memory_mb)
        self._mark_rest()
        await self._send(encode(Ready(tuple(concurrent))))
        return True

    def _per_group(self, name: str) -> bool:
        return self._config.per_group and is_function_path(name)

    async def _grade(self, batch: Batch) -> None:
        for envelope in batch.tasks:
            self._progress.set(envelope.number, LOAD_LIMIT_S)
            task = decode_task(envelope.body)
            grader = self._load(task)
            if isinstance(grader, str):
                outcomes = [Outcome.error(grader) for _ in task.inputs]
            elif isinstance(grader, CustomReward) and grader.is_async:
                self._learned.add(task.grader)
                await self._start_coroutine(grader, envelope, task, alone=batch.alone)
                continue
            else:
                computes = not isinstance(grader, CustomReward) and base_type(task.grader) != "code"
                self._progress.set(envelope.number, self._limit(task), is_processor_time=computes)
                graded = self._grade_now(grader, task)
                outcomes = graded or await self._out_of_memory(len(task.inputs))
            self._finish(envelope.number, outcomes)
            if time.monotonic() - self._last_flush > FLUSH_S:
                await self._flush()
        self._mark_rest()

    def _load(self, task: Task) -> Grader | CustomReward | str:
        try:
            return self._table.get(task.grader, per_group=task.grouped)
        except RollmillError as error:
            return str(error)

    def _grade_now(self, grader: Grader | CustomReward, task: Task) -> list[Outcome] | None:
        """The outcomes; None when the memory did not suffice."""
        try:
            if isinstance(grader, CustomReward):
                return call_function(grader, task.inputs)
            return [judge_with(grader, item) for item in task.inputs]
        except MemoryError:
            return None
        finally:
            self._end_if_forked()

    async def _out_of_memory(self, num_answers: int) -> list[Outcome]:
        """The outcomes of a task that ran out of memory, if that is its own doing.

        When what was graded before it fills the process, it is left unanswered and this process
        ends: its successor grades it again. Each process answers something, so that ends.
        """
        if self._num_graded > 0 and resident_bytes() > self._fat_bytes:
            await self._retire()
        self._must_retire = True  # the heap is full of this answer's remains: start afresh
        limit = self._config.worker_memory_mb
        return [Outcome.error(f"out of memory (limit {limit} MiB)")] * num_answers

    def _let_go(self) -> None:
        """In a process that a user's function forked: the run is not its to talk to."""
        self._sock.close()
        self._progress.detach()

    def _end_if_forked(self) -> None:
        """A function that forked comes back twice; only one of the two is the grading process."""
        if os.getpid() != self._process_id:
            os._exit(0)

    async def _start_coroutine(
        self, function: CustomReward, envelope: Envelope, task: Task, *, alone: bool
    ) -> None:
        running = asyncio.create_task(self._run_coroutine(function, envelope.number, task))
        if alone:
            self._progress.set(envelope.number, self._limit(task) + 1.0)
            await running
            return
        if not self._overlapping:
            self._heart = asyncio.create_task(self._beat())
        self._overlapping.add(running)
        running.add_done_callback(self._overlapping.discard)

    async def _run_coroutine(self, function: CustomReward, number: int, task: Task) -> None:
        try:
            outcomes, has_ended = await call_coroutine_function(
                function, task.inputs, self._limit(task)
            )
        except MemoryError:
            outcomes, has_ended = [], True
        self._end_if_forked()
        if not outcomes:
            outcomes = await self._out_of_memory(len(task.inputs))
        if not has_ended:
            self._must_retire = True  # it runs on: only the end of this process ends it
        self._finish(number, outcomes)
        await self._flush()

    async def _beat(self) -> None:
        while self._overlapping:
            self._mark_rest()
            await asyncio.sleep(HEARTBEAT_S)
        self._mark_rest()

    def _mark_rest(self) -> None:
        """Between tasks: nothing runs, or only coroutines that must keep the loop turning."""
        if self._overlapping:
            self._progress.set(OVERLAPPING, self._config.timeout_s + 10 * HEARTBEAT_S)
        else:
            self._progress.set(IDLE, 0.0)

    def _limit(self, task: Task) -> float:
        return self._config.timeout_s * max(1, len(task.inputs))

    def _finish(self, number: int, outcomes: list[Outcome]) -> None:
        self._finished.append(Result(number, outcomes))
        self._num_graded += 1
        self._num_unchecked += 1

    async def _retire_if_fat(self) -> None:
        """End this process when grading has left it large: the next one starts from the fork."""
        if self._num_unchecked < RETIRE_CHECK_EVERY and not self._must_retire:
            return
        self._num_unchecked = 0
        if self._must_retire or resident_bytes() > self._fat_bytes:
            await self._retire()

    async def _retire(self) -> Never:
        """End this process, once all coroutines that can still answer have done so."""
        if self._retiring is None:
            self._retiring = asyncio.create_task(self._end())
        if (current := asyncio.current_task()) is not None:
            self._overlapping.discard(current)
        await self._retiring
        raise AssertionError("the process has ended")

    async def _end(self) -> None:
        while self._overlapping:
            await asyncio.wait(self._overlapping)
        await self._flush()
        self._progress.set(RECYCLING, 0.0)
        os._exit(0)

    async def _flush(self) -> None:
        finished, self._finished = self._finished, []
        if finished:
            learned, self._learned = self._learned, set()
            await self._send(encode(Results(finished, tuple(sorted(learned)))))
        self._last_flush = time.monotonic()

    async def _send(self, payload: bytes) -> None:
        async with self._sending:  # frames of coroutines that end together must not mix
            await asyncio.get_running_loop().sock_sendall(self._sock, framed(payload))


def _is_async(grader: Grader | CustomReward) -> bool:
    return isinstance(grader, CustomReward) and grader.is_async
