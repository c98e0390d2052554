"""A grading worker: `python -m rollmill.rewards.worker FD`, started by the pool.

Two processes. This one imports the graders' libraries once, forks a grading process
(`child.py`), passes tasks down and results up, and watches the clock: when an answer passes its
deadline it kills the grading process, reports the one answer and forks a successor, which costs
milliseconds because everything is imported already. It runs no grader itself, so nothing can
hang it.

It ends by itself when the run is gone (its socket closes), and takes the grading process along.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback

from rollmill.rewards.child import run_child
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rewards.progress import OVERLAPPING, STARTING, Progress, SharedProgress
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

READ_BYTES = 1 << 18
MAX_FAILED_STARTS = 3
LOOK_EVERY_S = 0.02


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
        self._child_id = 0
        self._is_ready = False
        self._is_done = False
        self._failed_starts = 0
        self._progress = SharedProgress()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until the run closes the socket."""
        setup = self._read_setup()
        if setup is None:
            return
        self._setup = setup
        warm_up(setup)
        self._selector.register(self._run, selectors.EVENT_READ)
        self._start_child()
        try:
            while not self._is_done:
                self._turn()
        finally:
            self._kill_child()

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
            elif key.fileobj is self._child:
                if mask & selectors.EVENT_WRITE:
                    self._write_child()
                if mask & selectors.EVENT_READ:
                    self._hear_child()
        progress = self._progress.get()
        left = progress.seconds_left(self._child_id)
        if left is not None and left <= 0:
            self._replace_child(overdue=progress)

    def _seconds_left(self) -> float | None:
        """How long to sleep. The page changes without a message, so never long while there is
        work: a limit read now may be that of a task that is already over."""
        left = self._progress.get().seconds_left(self._child_id)
        if left is None:
            return LOOK_EVERY_S if self._outstanding else None
        return min(max(0.0, left) + 0.001, LOOK_EVERY_S)

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
        try:
            data = self._child.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._replace_child(overdue=None)
            return
        for frame in self._from_child.feed(data):
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

    def _replace_child(self, *, overdue: Progress | None) -> None:
        """Kill the grading process, settle the answer it was on, and start its successor."""
        status = self._kill_child()
        progress = self._progress.get()
        has_moved_on = overdue is not None and progress != overdue
        if progress.number == STARTING:
            self._failed_starts += 1
        elif progress.number >= 0 and not has_moved_on:
            self._report_culprit(progress, overdue is not None, status)
        elif progress.number == OVERLAPPING:
            self._is_alone = True
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._is_done = True
            return
        self._start_child()
        if not self._outstanding:
            self._is_alone = False
        elif self._is_alone:
            self._sent_alone = -1
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

    def _start_child(self) -> None:
        ours, theirs = socket.socketpair()
        self._progress.set(STARTING, 60.0)
        parent = os.getpid()
        self._child_id = os.fork()
        if self._child_id == 0:
            self._become_child(ours, theirs, parent)
        theirs.close()
        ours.setblocking(False)
        self._child = ours
        self._from_child = FrameBuffer()
        self._to_child = bytearray()
        self._sent_alone = -1
        self._selector.register(ours, selectors.EVENT_READ)

    def _become_child(self, ours: socket.socket, theirs: socket.socket, parent: int) -> None:
        code = 1
        try:
            ours.close()
            self._run.close()
            self._selector.close()
            run_child(self._setup, theirs, self._progress, parent)
            code = 0
        except BaseException:  # noqa: BLE001  (policy: told on stderr; the parent starts another)
            traceback.print_exc()
        finally:
            os._exit(code)

    def _send_child(self, payload: bytes) -> None:
        self._to_child += framed(payload)
        self._write_child()

    def _write_child(self) -> None:
        try:
            while self._to_child:
                del self._to_child[: self._child.send(self._to_child)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._to_child.clear()  # it died: the reading side will notice
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_child else 0)
        self._selector.modify(self._child, events)

    def _kill_child(self) -> str:
        """Kill and reap the grading process, if there is one; how it ended, in words."""
        if self._child_id == 0:
            return "ended"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child_id, signal.SIGKILL)
        os.kill(self._child_id, signal.SIGKILL)  # in case it has no group yet; not reaped yet
        _, status = os.waitpid(self._child_id, 0)
        self._child_id = 0
        self._selector.unregister(self._child)
        self._child.close()
        code = os.waitstatus_to_exitcode(status)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    main()
