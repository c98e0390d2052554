"""A grading worker: `python -m rollmill.rewards.worker FD`, started by the pool.

Two processes, sometimes three. This one imports the graders' libraries once, forks a grading
process (`process.py`), passes tasks down and results up, and watches the clock. When half of an
answer's time has gone it forks a spare, which gets ready meanwhile; at the deadline it kills the
grading process, reports the one answer and gives the rest to the spare, all within a millisecond.
It runs no grader itself, so nothing can hang it.

It ends by itself when the run is gone (its socket closes), and takes its forks along.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import socket
import sys
import tempfile
import time

from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rewards.process import READ_BYTES, Closable, GradingProcess
from rollmill.rewards.progress import IDLE, OVERLAPPING, STARTING, Progress
from rollmill.rewards.protocol import (
    Batch,
    Envelope,
    FrameBuffer,
    Ready,
    Result,
    Results,
    Setup,
    SetupFailed,
    decode_from_worker,
    decode_to_worker,
    encode,
    framed,
)
from rollmill.rewards.warm import warm_up

MAX_FAILED_STARTS = 3
LOOK_EVERY_S = 0.02
SPARE_AT = 0.5
"""A spare is forked when this share of an answer's limit is left."""


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # prints of user functions must not mix into the run's output
    worker = Worker(socket.socket(fileno=int(sys.argv[1])))
    worker.run()


class Worker:
    """The watching process. `run` returns when the run has gone or the worker is of no use."""

    def __init__(self, run: socket.socket) -> None:
        self._run = run
        self._from_run = FrameBuffer()
        self._outstanding: dict[int, Envelope] = {}
        self._is_alone = False
        self._sent_alone = -1
        self._is_ready = False
        self._is_done = False
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._spare: GradingProcess | None = None
        self._dying: list[GradingProcess] = []

    def run(self) -> None:
        """Serve until the run closes the socket."""
        setup = self._read_setup()
        if setup is None:
            return
        self._setup = setup
        # What grading processes that were killed leave behind goes when this one ends.
        with tempfile.TemporaryDirectory(
            prefix="rollmill-reward-", ignore_cleanup_errors=True
        ) as folder:
            tempfile.tempdir = folder
            warm_up(setup)
            self._selector.register(self._run, selectors.EVENT_READ)
            self._begin(self._fork())
            try:
                while not self._is_done:
                    self._turn()
            finally:
                self._end_all()

    def _read_setup(self) -> Setup | None:
        while data := self._receive():
            for frame in self._from_run.feed(data):
                message = decode_to_worker(frame)
                assert isinstance(message, Setup)
                return message
        return None

    def _receive(self) -> bytes:
        """What the run sent; empty when it is gone, whether it closed or was killed."""
        try:
            return self._run.recv(READ_BYTES)
        except ConnectionError:
            return b""

    def _tell_run(self, frame: bytes) -> None:
        """Send a frame to the run; when it is gone there is nothing more to do."""
        try:
            self._run.sendall(framed(frame))
        except ConnectionError:
            self._is_done = True

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._seconds_left()):
            if key.fileobj is self._run:
                self._hear_run()
            elif key.fileobj is self._grading.socket:
                if mask & selectors.EVENT_WRITE:
                    self._write_child()
                if mask & selectors.EVENT_READ:
                    self._hear_child()
        progress = self._grading.progress()
        left = self._grading.seconds_left(progress)
        if left is not None and left <= 0:
            self._replace(overdue=progress)
        elif left is not None and left < SPARE_AT * progress.limit_s and self._spare is None:
            self._spare = self._fork(self._grading.socket)
        self._dying = [one for one in self._dying if one.reap(wait=False) is None]

    def _seconds_left(self) -> float | None:
        """How long to sleep. The page changes without a message, so never long while there is
        work: a limit read now may be that of a task that is already over."""
        left = self._grading.seconds_left(self._grading.progress())
        if left is None:
            return LOOK_EVERY_S if self._outstanding or self._dying else None
        return min(max(0.0, left), LOOK_EVERY_S)

    def _hear_run(self) -> None:
        data = self._receive()
        if not data:
            self._is_done = True
            return
        for frame in self._from_run.feed(data):
            message = decode_to_worker(frame)
            if isinstance(message, Batch):
                self._outstanding.update((task.number, task) for task in message.tasks)
                if not self._is_alone:
                    self._send_child(frame)
        if self._is_alone:
            self._send_next_alone()

    def _hear_child(self) -> None:
        frames = self._grading.read()
        if frames is None:
            self._replace(overdue=None)
            return
        for frame in frames:
            self._pass_on(frame)

    def _pass_on(self, frame: bytes) -> None:
        message = decode_from_worker(frame)
        if isinstance(message, Results):
            for result in message.results:
                self._outstanding.pop(result.number, None)
            self._tell_run(frame)
            if self._is_alone:
                self._send_next_alone()
            return
        self._failed_starts = 0
        if not self._is_ready:
            self._tell_run(frame)
            self._is_ready = isinstance(message, Ready)
            self._is_done = isinstance(message, SetupFailed)

    def _send_next_alone(self) -> None:
        """After coroutines hung together: one at a time, until all of those are through."""
        if not self._outstanding:
            self._is_alone = False
        elif self._sent_alone not in self._outstanding:
            first = next(iter(self._outstanding.values()))
            self._sent_alone = first.number
            self._send_child(encode(Batch([first], alone=True)))

    def _replace(self, *, overdue: Progress | None) -> None:
        """Kill the grading process, settle the answer it was on, and let its successor begin.

        Nothing more is read from a killed process, so it does not matter what it still did: an
        answer is settled here, or it is sent to the successor.
        """
        status = self._kill(wait=overdue is None)
        progress = self._grading.progress()
        has_moved_on = overdue is not None and progress != overdue
        if progress.number == STARTING:
            self._failed_starts += 1
        elif progress.number >= 0 and not has_moved_on:
            self._report_culprit(progress, overdue is not None, status)
        elif progress.number in (OVERLAPPING, IDLE):
            # Idle: an answer that was graded kept its results from being sent. Which one, shows
            # when they are graded one at a time.
            if self._is_alone:
                suspect = dataclasses.replace(progress, number=self._sent_alone)
                self._report_culprit(suspect, False, status)
            self._is_alone = True
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._is_done = True
            return
        spare, self._spare = self._spare, None
        self._begin(spare or self._fork())
        if not self._outstanding:
            self._is_alone = False
        elif self._is_alone:
            self._send_next_alone()
        else:
            self._send_child(encode(Batch(list(self._outstanding.values()))))

    def _report_culprit(self, progress: Progress, timed_out: bool, status: str) -> None:
        envelope = self._outstanding.pop(progress.number, None)
        if envelope is None:
            return  # its result was passed on already
        seconds = time.monotonic() - progress.began
        if timed_out:
            detail = f"passed the time limit of {progress.limit_s:g} s"
            outcome = Outcome(OutcomeKind.TIMEOUT, detail=detail, seconds=seconds)
        else:
            outcome = Outcome.error(f"the grading process died ({status})", seconds)
        result = Result(envelope.number, [outcome] * envelope.num_answers)
        self._tell_run(encode(Results([result])))

    def _fork(self, *inherited: Closable) -> GradingProcess:
        return GradingProcess(self._setup, [self._run, self._selector, *inherited])

    def _begin(self, process: GradingProcess) -> None:
        self._grading = process
        self._sent_alone = -1
        self._selector.register(process.socket, selectors.EVENT_READ)
        process.begin()

    def _send_child(self, payload: bytes) -> None:
        self._grading.send(payload)
        self._watch_child()

    def _write_child(self) -> None:
        self._grading.write()
        self._watch_child()

    def _watch_child(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._grading.has_unsent else 0)
        self._selector.modify(self._grading.socket, events)

    def _kill(self, *, wait: bool) -> str:
        """Kill the grading process; how it ended, when that was waited for."""
        self._selector.unregister(self._grading.socket)
        self._grading.kill()
        status = self._grading.reap(wait=wait)
        if status is None:
            self._dying.append(self._grading)
            return "killed"
        return status

    def _end_all(self) -> None:
        """Kill and reap whatever was forked."""
        processes = [self._grading, *([self._spare] if self._spare else []), *self._dying]
        for process in processes:
            process.kill()
        for process in processes:
            process.reap(wait=True)


if __name__ == "__main__":
    main()
