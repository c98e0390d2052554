"""A user's own rollout function in the place of the built-in collecting.

The function takes groups, has them answered and judged as it likes, and returns the batch. The
books are kept for it: whatever it took and does not return goes back to the source (unfinished),
is rejected (finished, but not used) or failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollmill.data.ledger import State
from rollmill.errors import HookError, RollmillError
from rollmill.filters import KEEP
from rollmill.rollout.collector import Collector
from rollmill.rollout.fresh import is_done
from rollmill.rollout.group import first_line
from rollmill.rollout.round import (
    RoundParts,
    abort_requests,
    leave_failed_out,
    limits_of,
    round_metrics,
)
from rollmill.rollout.tasks import end_all
from rollmill.sample import Group

NOT_USED = "not_used"


@dataclass
class RolloutContext:
    """What a rollout function works with.

    Attributes:
        step: the training step.
        version: the weight version that the engines serve.
        batch_size: groups that the function must return.
    """

    step: int
    version: int
    batch_size: int
    _parts: RoundParts = field(repr=False)
    _taken: dict[int, Group] = field(default_factory=dict, repr=False)
    _on_take: Callable[[int], None] = field(default=lambda _: None, repr=False)
    _running: set[asyncio.Task[Group]] = field(default_factory=set, repr=False)

    def take(self, n: int) -> list[Group]:
        """`n` groups from the source: unfinished ones of earlier steps first, then fresh ones."""
        groups = self._parts.supply.take(n)
        self._taken |= {group.group_index: group for group in groups}
        self._on_take(n)
        return groups

    async def answer(self, group: Group) -> Group:
        """Generate and judge all samples of a group, in place; failures are on the samples."""
        task = asyncio.ensure_future(self._parts.runner.run(group))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await task


class RolloutFunction(Protocol):
    """The rollout hook."""

    async def __call__(self, context: RolloutContext) -> list[Group]:
        """Exactly `context.batch_size` of the taken groups, every sample finished and judged."""


class OwnRound:
    """One batch by the user's function; the same face as `Round`."""

    def __init__(
        self, parts: RoundParts, function: RolloutFunction, *, step: int, version: int
    ) -> None:
        self._parts = parts
        self._function = function
        self._started = time.monotonic()
        self._ready: list[Group] = []
        self.collector = Collector(limits_of(parts))
        self.context = RolloutContext(
            step, version, parts.config.batch_size, parts, _on_take=self.collector.submitted
        )

    async def fill(self) -> None:
        """Call the function and check what it returns.

        Raises:
            HookError: it raised, or returned something else than a batch.
        """
        for group in self._parts.supply.take_ready():
            self._parts.books.record(group, State.REJECTED, NOT_USED)
        try:
            groups = await self._function(self.context)
        except (RollmillError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise _bad("raised", first_line(error)) from error
        self._check(groups)
        for group in groups:
            leave_failed_out(group)
            del self.context._taken[group.group_index]
            self._parts.books.record(group, State.READY)
            self.collector.finished(group, KEEP)

    async def stop(self) -> None:
        """End what the function left running and book what it took and did not return."""
        context, running = self._parts.runner.context, self.context._running
        context.gate.close()
        try:
            await abort_requests(context, set(running), self._parts.config.abort_timeout_s)
        finally:
            await end_all(running)
            for group in self.context._taken.values():
                self._settle_unused(group)
            self.context._taken.clear()

    def _settle_unused(self, group: Group) -> None:
        books, collector = self._parts.books, self.collector
        if not all(map(is_done, group.samples)):
            self._parts.supply.give_back(group)
            collector.returned()
            return
        collector.num_in_flight -= 1
        failed = [sample.failure for sample in group.samples if sample.failure is not None]
        if failed:
            books.record(group, State.FAILED, failed[0])
            collector.failed.append((group, failed[0]))
            return
        books.record(group, State.REJECTED, NOT_USED)
        collector.rejected.append((group, NOT_USED))
        collector.reasons[NOT_USED] += 1

    def leftover(self) -> list[Group]:
        """Nothing is carried over beside what the source holds."""
        return []

    def metrics(self) -> dict[str, float]:
        """What it took."""
        return round_metrics(self.collector, self._parts.runner, self._started)

    def _check(self, groups: object) -> None:
        size = self.context.batch_size
        if not isinstance(groups, list) or not all(isinstance(g, Group) for g in groups):
            raise _bad("returned no list of groups", type(groups).__name__)
        indices = [group.group_index for group in groups]
        if len(indices) != size or len(set(indices)) != size:
            raise _bad("returned no full batch", f"{len(set(indices))} groups")
        if not all(self.context._taken.get(g.group_index) is g for g in groups):
            raise _bad("returned groups that it did not take in this step", str(indices)[:200])
        unfinished = [g.group_index for g in groups if not all(map(is_done, g.samples))]
        if unfinished:
            raise _bad("returned groups that are not finished and judged", str(unfinished)[:200])


def _bad(what: str, found: str) -> HookError:
    return HookError(
        f"the rollout function {what}",
        where="rollout.hooks.rollout",
        expected="a list of `context.batch_size` groups from `context.take`, all of them answered",
        found=found,
    )
