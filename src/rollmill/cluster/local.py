"""A worker process on this machine, called like an object with async methods."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollmill.cluster.frames import LENGTH, Call, Reply, from_wire, pack
from rollmill.errors import WorkerError, WorkerGone

logger = logging.getLogger(__name__)

END_GRACE_S = 2.0
"""How long a process whose connection closed may take to end, before it is said to be ending."""


class LocalWorker:
    """One child process that holds one object; `call` runs that object's methods in it.

    The child lives no longer than this process: it exits when the connection closes. Calls run
    one after the other in the child, and concurrently with everything here.

    Args:
        target: `module:Class` of the object.
        name: what to call the worker in messages (`trainer`).
        log_path: file that gets the child's output.
        environment: variables set on top of this process's own.
    """

    def __init__(
        self,
        target: str,
        *,
        name: str,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._target = target
        self._name = name
        self._log_path = log_path
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()

    @property
    def pid(self) -> int | None:
        """Process id while the child runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    async def start(self, **arguments: Any) -> None:
        """Start the child and build its object from `arguments`.

        Raises:
            WorkerError: it died, or building the object raised something of its own.
            RollmillError: of the same kind, when building the object raised one of ours.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rollmill.cluster.worker",
                    str(theirs.fileno()),
                    self._target,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader), name=f"read from {self._name}")
        await self.call("__init__", **arguments)

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Run a method of the child's object and give back its value.

        Raises:
            WorkerError: the child is gone, or the method raised something of its own.
            RollmillError: of the same kind, when the method raised one of ours.
        """
        if self._writer is None or self._reading is None or self._reading.done():
            raise self._gone()
        call_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._writer.write(pack(Call(call_id, method, arguments)))
            await self._writer.drain()
            return await future
        except ConnectionError:
            raise self._gone() from None
        finally:
            self._waiting.pop(call_id, None)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the child: close the connection, then kill what is left after `grace_s` seconds."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, grace_s)
            except subprocess.TimeoutExpired:
                logger.warning("the %s did not stop within %g s: killed", self._name, grace_s)
                os.killpg(self._process.pid, signal.SIGKILL)
                await asyncio.to_thread(self._process.wait)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decode = msgspec.msgpack.Decoder(Reply).decode
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._deliver(decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.to_thread(self._wait_for_end)  # to tell how it ended
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._gone())

    def _wait_for_end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_GRACE_S)

    def _deliver(self, reply: Reply) -> None:
        future = self._waiting.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(from_wire(reply.error, worker=self._name, log=str(self._log_path)))

    def _gone(self) -> WorkerError:
        code = self._process.poll() if self._process else None
        kind = WorkerError if self._process is None else WorkerGone
        return kind(
            f"the {self._name} process is gone",
            where=str(self._log_path),
            expected="a running process",
            found="not started" if self._process is None else _exit_text(code),
            fix=f"the log ends with:\n{tail(self._log_path)}",
        )


def tail(path: Path, num_lines: int = 12) -> str:
    """The last lines of a log file, indented, for an error message."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"    (no log: {error})"
    return "\n".join(f"    {line}" for line in lines[-num_lines:]) or "    (the log is empty)"


def _exit_text(code: int | None) -> str:
    if code is None:
        return "it closed its connection and is ending"
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"killed by signal {signal.Signals(-code).name}{hint}"
    return f"exit code {code}"
