"""Making the planned faults happen, with real means: signals, limits, broken connections.

Faults come while the run works, at a counted engine request of their step, so that the same seed
hits the same place. Each comes once in the life of a run folder: what has come is written to
`faults.jsonl` before it happens, so that a resume does not meet the same fault again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp

from rollmill.config.faults import FaultKind
from rollmill.loop.fault_plan import Fault

logger = logging.getLogger(__name__)

GENERATE_PATH = "/generate"
FULL_DISK_BYTES = 4096
"""Largest file that the trainer can write while its disk is "full"."""

ON_REPLY = (FaultKind.DROP, FaultKind.CORRUPT_REPLY)


class FaultInjector:
    """Lets planned faults happen. Its `middleware` goes into the engines' HTTP session.

    Args:
        plan: what comes when.
        log: `faults.jsonl` of the run.
        pause_s: how long a slow engine stands still.
    """

    def __init__(self, plan: Sequence[Fault], log: Path, *, pause_s: float) -> None:
        self._log = log
        self._pause_s = pause_s
        done = _steps_done(log) if plan else set()
        self._left = [fault for fault in plan if fault.step not in done]
        self._due: list[Fault] = []
        self._num_requests = 0
        self._engine_pids: Callable[[], Sequence[int | None]] = tuple
        self._trainer_pid: Callable[[], int | None] = lambda: None

    def attach(
        self,
        engine_pids: Callable[[], Sequence[int | None]],
        trainer_pid: Callable[[], int | None],
    ) -> None:
        """Say where the processes are."""
        self._engine_pids, self._trainer_pid = engine_pids, trainer_pid

    def step_began(self, step: int) -> None:
        """Requests are counted from here on; what did not come in earlier steps is overdue."""
        self._num_requests = 0
        self._due += [fault for fault in self._left if fault.step <= step]
        self._left = [fault for fault in self._left if fault.step > step]

    async def middleware(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Around every call to an engine: faults come before requests, or spoil their answers."""
        if request.url.path != GENERATE_PATH:
            return await handler(request)
        fault = self._take_due()
        if fault is not None and fault.kind not in ON_REPLY:
            self._break_process(fault)
        response = await handler(request)
        if fault is not None and fault.kind is FaultKind.DROP:
            response.close()
            raise aiohttp.ServerDisconnectedError("the connection was broken on purpose")
        if fault is not None and fault.kind is FaultKind.CORRUPT_REPLY:
            body = await response.read()
            # what read() gives from now on; aiohttp has no public way to put another body there
            response._body = body[: int(fault.choice * len(body))]
        return response

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint: the disk may be full."""
        fault = next((f for f in self._due if f.kind is FaultKind.DISK_FULL), None)
        pid = self._trainer_pid()
        if fault is None or pid is None:
            yield
            return
        self._due.remove(fault)
        self._note(fault)
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, before[1]))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    def _take_due(self) -> Fault | None:
        """The fault that comes with this request, if any."""
        self._num_requests += 1
        for fault in self._due:
            if fault.kind is not FaultKind.DISK_FULL and fault.after_requests < self._num_requests:
                self._due.remove(fault)
                self._note(fault)
                return fault
        return None

    def _break_process(self, fault: Fault) -> None:
        if fault.kind is FaultKind.TRAINER_KILL:
            _send(self._trainer_pid(), signal.SIGKILL)
            return
        running = [pid for pid in self._engine_pids() if pid is not None]
        if not running:
            return
        pid = running[int(fault.choice * len(running))]
        if fault.kind is FaultKind.ENGINE_KILL:
            _send(pid, signal.SIGKILL)
            return
        _send(pid, signal.SIGSTOP)
        if fault.kind is FaultKind.ENGINE_SLOW:
            asyncio.get_running_loop().call_later(self._pause_s, _send, pid, signal.SIGCONT)

    def _note(self, fault: Fault) -> None:
        logger.warning("fault on purpose: %s (planned for step %d)", fault.kind, fault.step)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": fault.step, "kind": fault.kind}) + "\n")


def _send(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _steps_done(log: Path) -> set[int]:
    """Steps whose fault came already; a line that a kill cut off does not count."""
    done = set()
    if log.is_file():
        for line in log.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                done.add(int(json.loads(line)["step"]))
    return done
