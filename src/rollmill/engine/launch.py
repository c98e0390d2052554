"""Starting servers of ours and knowing when they are up: embedded engines, the router.

The invariant: after `start` the server answers at its URL; when `start` raises, nothing is left
running and the error shows the end of the server's log.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from rollmill.config.engine import EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineCallError, EngineStartError
from rollmill.engine.process import ChildProcess, base_url, can_listen, free_port

EMBEDDED_ENGINE = (sys.executable, "-m", "rollmill.engine.embedded")
POLL_INTERVAL_S = 0.1


class ServerProcess:
    """A process that serves HTTP on one port; can be started again after it ended.

    Args:
        name: what it is, for messages and the name of its log.
        config: address and timeouts.
        session: connection pool for health checks.
        run_dir: the log goes to `logs/` there.
        port: None takes a free one, now and for ever.
        port_field: the config field that sets the port, for messages.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        session: aiohttp.ClientSession,
        *,
        run_dir: Path,
        port: int | None,
        port_field: str,
    ) -> None:
        self.port = port if port is not None else free_port(config.host)
        self.url = base_url(config.host, self.port)
        self._config = config
        self._session = session
        self._port_field = port_field
        self._child = ChildProcess(name, run_dir / "logs" / f"{name}.log")

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._child.pid

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self._child.log_path

    def command(self) -> list[str]:
        """The command line."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the process and return when it answers its health check.

        Raises:
            EngineStartError: the port is taken, the process ended early, or it did not answer
                within `start_timeout_s`; nothing is left running.
        """
        await self.stop()
        self._check_port()
        await self._child.spawn(self.command())
        try:
            await self._wait_until_healthy()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the process, gently at first; returns when it is gone."""
        await self._child.stop()

    async def kill(self) -> None:
        """End the process at once."""
        await self._child.kill()

    async def wait_exit(self) -> str:
        """Return when the process has ended: how, with the last lines of its log."""
        return await self._child.wait_exit()

    async def _wait_until_healthy(self) -> None:
        client = EngineClient(self.url, self._config, self._session)
        exited = asyncio.create_task(self.wait_exit())
        timeout_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._is_healthy(client):
                    done, _ = await asyncio.wait({exited}, timeout=POLL_INTERVAL_S)
                    if done:
                        raise self._start_error(exited.result())
        except TimeoutError:
            raise self._start_error(
                f"no answer within engine.start_timeout_s = {timeout_s:g} s; "
                f"its log ends:\n{self._child.log_tail()}"
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
            f"{self._child.name} did not start",
            where=f"{self.url}, log {self.log_path}",
            expected="an answer to GET /health",
            found=found,
        )

    def _check_port(self) -> None:
        if can_listen(self._config.host, self.port):
            return
        raise EngineStartError(
            f"port {self.port} is in use already",
            where=self._port_field,
            expected=f"a free port for {self._child.name} on {self._config.host}",
            found="another program listens there (an engine of an earlier run, perhaps)",
            fix=f"stop that program, set {self._port_field} to another number, or leave it out "
            "to take a free one",
        )


class EmbeddedProcess(ServerProcess):
    """One embedded engine.

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
        port = config.port + index if config.port is not None else None
        super().__init__(
            f"engine_{index}",
            config,
            session,
            run_dir=run_dir,
            port=port,
            port_field="engine.port",
        )
        self._model_path = model_path
        self._tokenizer_path = tokenizer_path
        self._context_length = context_length
        self._weight_version = weight_version
        self._program = tuple(program)

    def command(self) -> list[str]:
        """The command line; the engine ends by itself when our end of its stdin closes."""
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
