"""A server as a child process, with its output in a log file.

The invariant: the child never outlives us unnoticed. Its standard input is a pipe that closes
however this process dies, and `stop` ends it with SIGTERM, then SIGKILL, and reaps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rollmill.engine.errors import EngineStartError

logger = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
NUM_LOG_LINES = 20
TAIL_BYTES = 16384


class ChildProcess:
    """One process at a time; can be started again after it ended.

    Args:
        name: what it is, for messages.
        log_path: its output goes here, after what is there already.
    """

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._log_start = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def spawn(self, command: Sequence[str]) -> None:
        """Start the process; what ran before must have been stopped.

        Raises:
            EngineStartError: the program cannot be run.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = await self._create(command, log)
        logger.info("%s: process %d", self.name, self._process.pid)

    async def stop(self) -> None:
        """End the process, gently at first; returns when it is gone."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_GRACE_S):
                    await process.wait()
            except TimeoutError:
                logger.warning("%s did not stop on SIGTERM; killing it", self.name)
            finally:
                await self.kill()
        self._process = None

    async def kill(self) -> None:
        """End the process at once: for one that does not answer any more."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._process is process:  # else another one was started meanwhile
            self._process = None

    async def wait_exit(self) -> str:
        """Return when the process has ended: how, with the last lines of its log."""
        process = self._process
        if process is None:
            return "the process does not run"
        code = await process.wait()
        return f"the process ended with exit code {code}; its log ends:\n{self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines that this process wrote, indented."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(f"    {line}" for line in lines[-NUM_LOG_LINES:]) or "    (empty)"

    async def _create(self, command: Sequence[str], log: IO[bytes]) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to handle: engines end after the driver
            )
        except OSError as error:
            raise EngineStartError(
                "a process could not be started", where=self.name, found=str(error)
            ) from error


def base_url(host: str, port: int) -> str:
    """The URL of a server at this address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with _probing_socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def can_listen(host: str, port: int) -> bool:
    """Whether a server could listen on this port now."""
    with _probing_socket(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _probing_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe
