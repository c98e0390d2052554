"""The stall doctor: when nothing finishes for a while, what blocks, and what is done about it.

It watches while the loop waits for rollouts, and every evaluation. As long as requests, judgements
or answers end, however few, nothing is said. When none has ended for `timeout_s`, the diagnosis
names what has been waited for longest, for which group and at which engine, and the policy acts. Of
a trainer's step and a weight sync it only tells how long they have taken: nobody can say what is
too long there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from rollmill.errors import StallError
from rollmill.loop.activities import Activities, Activity, Kind
from rollmill.rollout.tasks import end_all

logger = logging.getLogger(__name__)
T = TypeVar("T")

NUM_NAMED = 8
"""Most blockers that a diagnosis names."""
REQUEST_GRACE_S = 1.0
"""From an engine's answer to an abort until the request is back with its tokens."""


class Engines(Protocol):
    """What the doctor needs of the engines; `EnginePool` is one."""

    def describe(self) -> str:
        """How each engine is."""

    def engine_of(self, rid: str) -> str | None:
        """Where a request is; None when it waits for an engine."""

    async def abort(self, rid: str, deadline_s: float) -> object:
        """Stop this request, and no other."""


@dataclass(frozen=True)
class Diagnosis:
    """What is found when nothing goes on.

    Attributes:
        seconds: since anything ended.
        blockers: what has been waited for most of that time, oldest first.
        lines: one per blocker, for people, and how the engines are.
    """

    seconds: float
    blockers: Sequence[Activity]
    lines: Sequence[str]

    @property
    def headline(self) -> str:
        """One sentence."""
        return f"no request, judgement or answer has finished for {self.seconds:.0f} s"


class StallDoctor:
    """Watches over waits.

    Args:
        timeout_s: how long nothing may finish; None never looks.
        policy: `warn`, `retry` (end what blocks; its sample is tried again) or `stop`.
        abort_timeout_s: how long an engine may take to end a request.
        activities: what is waited for.
        engines: of training.
    """

    def __init__(
        self,
        *,
        timeout_s: float | None,
        policy: Literal["warn", "retry", "stop"],
        abort_timeout_s: float,
        activities: Activities,
        engines: Engines,
    ) -> None:
        self.num_stalls = 0
        self._timeout_s = timeout_s
        self._policy = policy
        self._abort_timeout_s = abort_timeout_s
        self._activities = activities
        self._engines = engines

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """The value of `work`, watched while it is waited for.

        Raises:
            StallError: nothing finished for too long, and the policy is to stop.
        """
        if self._timeout_s is None:
            return await work
        treated = self._activities.clock()
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                quiet_since = self._quiet_since(treated)
                left_s = quiet_since + self._timeout_s - self._activities.clock()
                if left_s > 0:
                    await asyncio.wait({task}, timeout=left_s)
                else:
                    await self._treat(self.diagnose(quiet_since))
                    treated = self._activities.clock()
            return task.result()
        finally:
            await end_all([task])

    async def mind(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """The value of `work`, the trainer's or a sync; every `timeout_s` that it takes is told."""
        if self._timeout_s is None:
            return await work
        started = self._activities.clock()
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._timeout_s))[0]:
                seconds = self._activities.clock() - started
                logger.warning("%s has been going on for %.0f s", what, seconds)
            return task.result()
        finally:
            await end_all([task])

    def _quiet_since(self, treated: float) -> float:
        """When the silence began: the last end, or the start of what has been waited for since."""
        waiting = self._activities.waiting()
        oldest = waiting[0].started if waiting else treated
        return max(self._activities.last_end, oldest, treated)

    def diagnose(self, quiet_since: float) -> Diagnosis:
        """What has been waited for most of that time: requests and judgements first, since a
        function that waits may just be queueing behind them."""
        now = self._activities.clock()
        least_s = (now - quiet_since) / 2
        old = [a for a in self._activities.waiting() if now - a.started >= least_s]
        blockers = [a for a in old if a.kind is not Kind.ANSWER] or old
        lines = [self._describe(activity, now) for activity in blockers[:NUM_NAMED]]
        if len(blockers) > NUM_NAMED:
            lines.append(f"and {len(blockers) - NUM_NAMED} more")
        if not blockers:
            lines.append("nothing known is waited for: a function of your own may hang")
        lines.append(f"engines: {self._engines.describe()}")
        return Diagnosis(now - quiet_since, blockers, lines)

    def _describe(self, activity: Activity, now: float) -> str:
        group = "" if activity.group is None else f"group {activity.group}: "
        text = f"{group}{activity.kind} {activity.name} for {now - activity.started:.0f} s"
        if activity.kind is Kind.REQUEST:
            text += f", at {self._engines.engine_of(activity.name) or 'no engine yet'}"
        return text

    async def _treat(self, diagnosis: Diagnosis) -> None:
        self.num_stalls += 1
        found = "\n    ".join(diagnosis.lines)
        if self._policy == "stop":
            raise StallError(
                diagnosis.headline,
                where="run.on_stall: stop",
                expected=f"something within run.stall_timeout_s = {self._timeout_s:g} s",
                found=found,
                fix="see the engines' and the trainer's logs; the run goes on from its last "
                "checkpoint",
            )
        logger.warning("%s:\n    %s", diagnosis.headline, found)
        if self._policy == "retry":
            await asyncio.gather(*(self._end(activity) for activity in diagnosis.blockers))

    async def _end(self, activity: Activity) -> None:
        """A request comes back with its tokens when its engine can still say so."""
        reason = "ended because nothing went on (run.on_stall: retry)"
        if activity.kind is Kind.REQUEST:
            await self._engines.abort(activity.name, self._abort_timeout_s)
            await activity.interrupt(reason, grace_s=REQUEST_GRACE_S)
        else:
            await activity.interrupt(reason)
