"""A grading process as the process above it holds it: forked, talked to, killed, reaped.

`child.py` is what runs inside. Nothing here waits for the grading process: writes are buffered, and
a killed one is reaped later, because a process full of an exploded answer takes a while to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Iterable
from typing import Protocol

from rollmill.rewards.child import LOAD_LIMIT_S, run_child
from rollmill.rewards.progress import STARTING, Progress, SharedProgress
from rollmill.rewards.protocol import Begin, FrameBuffer, Setup, encode, framed

READ_BYTES = 1 << 18


class Closable(Protocol):
    """Something with a descriptor."""

    def close(self) -> None: ...  # noqa: D102


class GradingProcess:
    """A fork of this process that grades once `begin` was called; until then it is a spare.

    Args:
        setup: what it grades, and how.
        inherited: what is open here and is not the fork's business: closed in the fork.

    Attributes:
        socket: the connection to it, for a selector.
    """

    def __init__(self, setup: Setup, inherited: Iterable[Closable]) -> None:
        self._ending: str | None = None
        self._progress = SharedProgress()
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self.socket, theirs = socket.socketpair()
        parent = os.getpid()
        self._process_id = os.fork()
        if self._process_id == 0:
            self._become_child(setup, theirs, parent, inherited)
        theirs.close()
        self.socket.setblocking(False)

    def begin(self) -> None:
        """Have it load its graders, say so, and grade what is sent."""
        self._progress.set(STARTING, LOAD_LIMIT_S)
        self.send(encode(Begin()))

    def progress(self) -> Progress:
        """What it is doing."""
        return self._progress.get()

    def seconds_left(self, progress: Progress) -> float | None:
        """Time until what it was doing passes its limit, at most 0 when it has; None when idle."""
        return progress.seconds_left(self._process_id)

    @property
    def has_unsent(self) -> bool:
        """Whether `write` should be called when the socket takes more."""
        return bool(self._unsent)

    def send(self, payload: bytes) -> None:
        """Send a frame, or keep what the socket does not take now."""
        self._unsent += framed(payload)
        self.write()

    def write(self) -> None:
        """Send what was kept."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()  # it died: the reading side will notice

    def read(self) -> list[bytes] | None:
        """The frames that have come; None when it is gone."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        return self._frames.feed(data) if data else None

    def kill(self) -> None:
        """Kill it and what it started, and hear nothing more of it."""
        if self._ending is None:  # not reaped yet, so the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process_id, signal.SIGKILL)
            os.kill(self._process_id, signal.SIGKILL)  # in case it has no group yet
        self.socket.close()

    def reap(self, *, wait: bool) -> str | None:
        """How it ended, in words; None while it has not (never with `wait`)."""
        if self._ending is None:
            reaped, status = os.waitpid(self._process_id, 0 if wait else os.WNOHANG)
            if reaped:
                self._ending = _in_words(os.waitstatus_to_exitcode(status))
        return self._ending

    def _become_child(
        self, setup: Setup, theirs: socket.socket, parent: int, inherited: Iterable[Closable]
    ) -> None:
        code = 1
        try:
            self.socket.close()
            for one in inherited:
                one.close()
            run_child(setup, theirs, self._progress, parent)
            code = 0
        except BaseException:  # noqa: BLE001  (policy: told on stderr; the parent starts another)
            traceback.print_exc()
        finally:
            os._exit(code)


def _in_words(exit_code: int) -> str:
    if exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
