"""Starting and stopping one embedded engine as a process of its own.

The invariant: the process never outlives us. It is told to exit when its standard input closes
(which happens however this process dies), and `stop` ends it with SIGTERM, then SIGKILL, and
reaps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import aiohttp

from rollmill.config.engine import EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineCallError, EngineStartError

logger = logging.getLogger(__name__)

EMBEDDED_ENGINE = (sys.executable, "-m", "rollmill.engine.embedded")
STOP_GRACE_S = 10.0
POLL_INTERVAL_S = 0.1
NUM_LOG_LINES = 20
TAIL_BYTES = 16384


class EmbeddedProcess:
    """One engine process; can be started again after it ended, on the same port.

    Args:
        config: address, port and timeouts; `config.embedded` is passed on.
        session: connection pool for health checks.
        index: number of this engine in the pool; its port is `config.port` + index.
        model_path: folder with the first weights.
        tokenizer_path: tokenizer folder, when it is not the model's.
        context_length: most tokens of context and answer; None is the model's own limit.
        run_dir: the log goes to `logs/engine_INDEX.log` there.
        weight_version: version of the first weights.
        program: what to start; takes the command line of the embedded engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        session: aiohttp.ClientSession,
        *,
        index: int,
        model_path: str,
        tokenizer_path: str | None,
        context_length: int | None,
        run_dir: Path,
        weight_version: int = 0,
        program: Sequence[str] = EMBEDDED_ENGINE,
    ) -> None:
        self._config = config
        self._session = session
        self._index = index
        self._model_path = model_path
        self._tokenizer_path = tokenizer_path
        self._context_length = context_length
        self._weight_version = weight_version
        self._program = tuple(program)
        self._process: asyncio.subprocess.Process | None = None
        self.log_path = run_dir / "logs" / f"engine_{index}.log"
        self._log_start = 0
        self.port = config.port + index if config.port is not None else free_port(config.host)

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start the process and return when it answers its health check.

        Raises:
            EngineStartError: the port is taken, the process ended early, or it did not answer
                within `start_timeout_s`; nothing is left running.
        """
        await self.stop()
        self._check_port()
        await self._spawn()
        try:
            await self._wait_until_healthy()
        except BaseException:
            await self.stop()
            raise

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
                logger.warning("engine %d did not stop on SIGTERM; killing it", self._index)
            finally:
                await self._kill(process)
        self._process = None

    async def kill(self) -> None:
        """End the process at once: for an engine that does not answer any more."""
        if self._process is not None:
            await self._kill(self._process)
            self._process = None

    async def wait_exit(self) -> str:
        """Return when the process has ended: how, with the last lines of its log."""
        process = self._process
        if process is None:
            return "the process does not run"
        code = await process.wait()
        return f"the process ended with exit code {code}; its log ends:\n{self._log_tail()}"

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def _command(self) -> list[str]:
        command = [
            *self._program,
            self._model_path,
            *("--host", self._config.host, "--port", str(self.port)),
            *("--config-json", self._config.embedded.model_dump_json()),
            *("--weight-version", str(self._weight_version)),
        ]
        if self._context_length is not None:
            command += ["--context-length", str(self._context_length)]
        if self._tokenizer_path is not None:
            command += ["--tokenizer", self._tokenizer_path]
        return [*command, "--exit-with-stdin"]

    async def _spawn(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = await self._create(log)
        logger.info("engine %d: process %d on %s", self._index, self._process.pid, self.url)

    async def _create(self, log: IO[bytes]) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to handle: engines end after the driver
            )
        except OSError as error:
            raise EngineStartError(
                "the engine's process could not be started",
                where=f"engine {self._index}",
                found=str(error),
            ) from error

    async def _wait_until_healthy(self) -> None:
        client = EngineClient(self.url, self._config, self._session)
        exited = asyncio.create_task(self.wait_exit())
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while not await self._is_healthy(client):
                    done, _ = await asyncio.wait({exited}, timeout=POLL_INTERVAL_S)
                    if done:
                        raise self._start_error(exited.result())
        except TimeoutError:
            raise self._start_error(
                f"no answer within engine.start_timeout_s = {self._config.start_timeout_s:g} s; "
                f"its log ends:\n{self._log_tail()}"
            ) from None
        finally:
            exited.cancel()
            await asyncio.gather(exited, return_exceptions=True)

    async def _is_healthy(self, client: EngineClient) -> bool:
        try:
            await client.health(timeout_s=self._config.health_timeout_s)
        except EngineCallError:
            return False
        return True

    def _start_error(self, found: str) -> EngineStartError:
        return EngineStartError(
            "the engine did not start",
            where=f"engine {self._index} on {self.url}, log {self.log_path}",
            expected="an answer to GET /health",
            found=found,
        )

    def _check_port(self) -> None:
        if can_listen(self._config.host, self.port):
            return
        raise EngineStartError(
            f"port {self.port} is in use already",
            where="engine.port",
            expected=f"a free port for engine {self._index} on {self._config.host}",
            found="another program listens there (an engine of an earlier run, perhaps)",
            fix="stop that program, set engine.port to another number, or leave it out to let "
            "every engine take a free one",
        )

    def _log_tail(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(f"    {line}" for line in lines[-NUM_LOG_LINES:]) or "    (empty)"


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with _listening_socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def can_listen(host: str, port: int) -> bool:
    """Whether a server could listen on this port now."""
    with _listening_socket(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _listening_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe
