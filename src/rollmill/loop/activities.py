"""What rollouts wait for at this moment: engine requests, judgements, generate functions.

Each is registered while it runs, so that a run that does not go on can say what holds it up and
since when (`doctor`), and can end just that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from rollmill.errors import StallError
from rollmill.rollout.gate import is_being_cancelled

T = TypeVar("T")
_around: ContextVar[Activity | None] = ContextVar("activity", default=None)
"""What the current task is a part of."""


class Kind(StrEnum):
    """What is waited for."""

    REQUEST = "engine request"
    REWARD = "reward"
    ANSWER = "generate function"


@dataclass(eq=False, slots=True)
class Activity:
    """One thing that is waited for.

    Attributes:
        kind: what it is.
        name: the request's id, or what is judged.
        group: the group it is for, when known.
        started: when, by the clock of its `Activities`.
        num_inner: activities that it waits for itself.
    """

    kind: Kind
    name: str
    group: int | None
    started: float
    num_inner: int = 0
    _task: asyncio.Task[Any] | None = field(default=None, repr=False)
    _reason: str | None = None

    async def interrupt(self, reason: str, *, grace_s: float = 0.0) -> None:
        """End it: whoever waits for it gets a StallError with the reason.

        Args:
            reason: why.
            grace_s: how long it may take to end by itself before.
        """
        if self._task is None:
            return
        if grace_s:
            await asyncio.wait({self._task}, timeout=grace_s)
        if not self._task.done():
            self._reason = reason
            self._task.cancel()


class Activities:
    """All that is waited for in one run.

    Args:
        clock: seconds, only ever forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last_end = clock()
        self._running: dict[Activity, None] = {}

    def waiting(self) -> list[Activity]:
        """What waits for nothing that is known here itself, oldest first."""
        inner = [activity for activity in self._running if not activity.num_inner]
        return sorted(inner, key=lambda activity: activity.started)

    async def run(
        self, kind: Kind, name: str, work: Callable[[], Awaitable[T]], *, group: int | None = None
    ) -> T:
        """The value of `work()`, registered while it runs.

        Raises:
            StallError: it was interrupted.
        """
        around = _around.get()
        if group is None and around is not None:
            group = around.group
        activity = Activity(kind, name, group, self.clock())
        task = asyncio.ensure_future(self._inside(activity, work))
        activity._task = task
        self._running[activity] = None
        if around is not None:
            around.num_inner += 1
        try:
            outcome = await task
        except asyncio.CancelledError:
            if activity._reason is not None and not is_being_cancelled():
                raise StallError(activity._reason, where=f"{kind} {name}") from None
            raise
        finally:
            del self._running[activity]
            if around is not None:
                around.num_inner -= 1
            self.last_end = self.clock()
        if isinstance(outcome, _Exit):
            raise outcome.error
        return outcome

    async def _inside(self, activity: Activity, work: Callable[[], Awaitable[T]]) -> T | _Exit:
        """Run `work` as a part of `activity`. A SystemExit must not leave a task: it would end the
        whole event loop."""
        _around.set(activity)
        try:
            return await work()
        except SystemExit as error:
            return _Exit(error)


@dataclass(frozen=True, slots=True)
class _Exit:
    error: SystemExit
