"""Several worker processes that look like one: every call goes to all of them at the same time.

The ranks of a trainer work in step: a rank that is missing leaves the others waiting for ever in a
collective operation. So the invariant here: either all ranks are there, or none is. When one dies,
or fails alone while the others go on, the rest are ended and every call says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rollmill.cluster.local import LocalWorker
from rollmill.errors import RollmillError, WorkerError, WorkerGone

GRACE_S = 10.0
"""How long after one rank's failure the others may take to fail too and so stay usable."""

END_GRACE_S = 2.0
"""How long ranks that are ended may take before they are killed."""


class Worker(Protocol):
    """One process, or several that look like one."""

    @property
    def pid(self) -> int | None:
        """Process id while it runs (of rank 0)."""

    async def start(self, **arguments: Any) -> None:
        """Start it and build its object."""

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Run a method of its object and give back the value."""

    async def stop(self, grace_s: float = 5.0) -> None:
        """End it."""


class RankGroup:
    """`num_ranks` processes, each with an object of the same class, called together.

    The class gets `rank`, `num_ranks` and `rendezvous` on top of the arguments of `start`. The
    value of a call is rank 0's.

    Args:
        target: `module:Class` of the objects.
        name: what to call the group in messages (`trainer`).
        num_ranks: how many processes.
        log_path: rank 0's output; the others' is beside it.
        environment: variables set on top of this process's own.
        grace_s: how long the others may go on after one has failed.
    """

    def __init__(
        self,
        target: str,
        *,
        name: str,
        num_ranks: int,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._name = name
        self._grace_s = grace_s
        self._ranks = [
            _Rank(
                target,
                name=f"{name} (rank {rank} of {num_ranks})",
                log_path=_log_of(log_path, rank),
                environment=environment,
            )
            for rank in range(num_ranks)
        ]
        self._meeting_place: Path | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure: RollmillError | None = None

    @property
    def pid(self) -> int | None:
        """Process id of rank 0 while it runs."""
        return self._ranks[0].pid

    @property
    def pids(self) -> list[int | None]:
        """Process id of every rank; None for one that has ended."""
        return [rank.pid for rank in self._ranks]

    async def start(self, **arguments: Any) -> None:
        """Start every rank and build its object from `arguments`.

        Raises:
            WorkerError: one died, or building an object raised something of its own.
            RollmillError: of the same kind, when building an object raised one of ours.
        """
        self._meeting_place = Path(tempfile.mkdtemp(prefix="rollmill-ranks-"))
        shared = {
            "num_ranks": len(self._ranks),
            "rendezvous": f"file://{self._meeting_place / 'rendezvous'}",
        }
        tasks = [
            asyncio.create_task(rank.start(**arguments, **shared, rank=number))
            for number, rank in enumerate(self._ranks)
        ]
        await self._together(tasks)
        self._watching = asyncio.create_task(self._watch(), name=f"watch the {self._name}")

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Run a method on every rank; the value of rank 0.

        Raises:
            WorkerError: a rank is gone (the others are ended), or the method raised something of
                its own.
            RollmillError: of the same kind, when the method raised one of ours.
        """
        if self._failure is not None:
            raise self._failure
        return await self._together(
            [asyncio.create_task(rank.call(method, **arguments)) for rank in self._ranks]
        )

    async def stop(self, grace_s: float = 5.0) -> None:
        """End every rank: close the connections, then kill what is left after `grace_s` s."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*(rank.stop(grace_s) for rank in self._ranks))
        if self._meeting_place is not None:
            shutil.rmtree(self._meeting_place, ignore_errors=True)

    async def _together(self, tasks: list[asyncio.Task[Any]]) -> Any:
        """The value of the first of `tasks` when all succeed.

        When all fail within the grace time (the same mistake everywhere), the group goes on.
        """
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks):
                await self._settle(tasks)
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Raise what went wrong, after ending the ranks that would wait for those that failed."""
        if not any(rank.is_gone for rank in self._ranks):
            await asyncio.wait(tasks, timeout=self._grace_s)
        failed = [one for task in tasks if task.done() and (one := task.exception()) is not None]
        dead = next((rank for rank in self._ranks if rank.is_gone), None)
        if len(failed) == len(tasks) and dead is None and self._failure is None:
            raise failed[0]
        error: BaseException | None = self._failure  # the watch saw which rank went first
        if error is None:
            ours = [one for one in failed if not isinstance(one, WorkerError)]
            error = ours[0] if ours else failed[0] if dead is None else await dead.post_mortem()
        await self._end(error)
        raise error

    async def _watch(self) -> None:
        """End the group when a rank's connection closes while nobody calls."""
        gone = [asyncio.create_task(rank.closed()) for rank in self._ranks]
        try:
            await asyncio.wait(gone, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in gone:
                task.cancel()
        first = next(r for r, task in zip(self._ranks, gone, strict=True) if task.done())
        await self._end(await first.post_mortem())

    async def _end(self, error: BaseException) -> None:
        """Kill every rank; calls from here on raise `error`, or what it led to."""
        if self._failure is None:
            self._failure = (
                error
                if isinstance(error, WorkerError)
                else WorkerGone(
                    f"the {self._name} was ended after one of its ranks failed", found=str(error)
                )
            )
        await asyncio.gather(*(rank.stop(END_GRACE_S) for rank in self._ranks))


class _Rank(LocalWorker):
    """A worker that tells when its process is gone."""

    @property
    def is_gone(self) -> bool:
        """Whether the connection is closed, or was never open."""
        return self._reading is None or self._reading.done()

    async def closed(self) -> None:
        """Return when the connection is closed."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def post_mortem(self) -> WorkerError:
        """The error of a call to a process that is gone, with how it ended once that is known."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_GRACE_S)
        return self._gone()


def _log_of(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}_rank{rank}{path.suffix}")
