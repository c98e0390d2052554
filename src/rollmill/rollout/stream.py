"""Rollouts that never pause: batches are taken from work that goes on while the trainer trains.

`Stream` is the asyncio shell around `StalenessGate`, as `Round` is around `Collector`; it lives as
long as the run and settles groups as a round does. One background task, the pump, submits groups
whenever the gate admits some and settles those that end. Invariants: no group is in a batch whose
oldest token is more than `max_staleness` versions old (proved in `staleness`); an error in the
pump ends the next `next_batch`, never silently; after `stop` no task is left and every group is
booked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from rollmill.filters import Verdict
from rollmill.rollout.collector import NEVER_FULL, Collector
from rollmill.rollout.fresh import restart_group
from rollmill.rollout.length_bias import LengthBias
from rollmill.rollout.round import (
    ATTEMPTS_PER_TURN,
    Round,
    RoundParts,
    limits_of,
    round_metrics,
)
from rollmill.rollout.staleness import StalenessGate
from rollmill.rollout.tasks import end_all
from rollmill.sample import Group

PartsOf = Callable[[int, int], RoundParts]


class Stream(Round):
    """Continuous rollouts.

    Args:
        parts_of: what the rollouts of a (step, version) work with.
        step: the first step that a batch is wanted for.
        version: of the weights that are served.
        last_step: of the run; no prompt is submitted that no batch up to it needs.
    """

    def __init__(
        self, parts_of: PartsOf, *, step: int, version: int, last_step: int | None = None
    ) -> None:
        parts = parts_of(step, version)
        super().__init__(parts)
        self._parts_of = parts_of
        self._step = step
        self._ages = StalenessGate(
            batch_size=parts.config.batch_size,
            max_staleness=parts.config.max_staleness,
            version=version,
            last_step=last_step,
        )
        self._length_bias = LengthBias()
        self._finished: dict[int, Group] = {}
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._wakes: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue()
        self.collector = self._new_collector()
        self._restore()

    async def next_batch(self) -> list[Group]:
        """The groups of the next step, by group index; waits until they are finished.

        Raises:
            RolloutError: too many groups failed or were rejected.
        """
        if self._pump is None:
            self._pump = asyncio.create_task(self._run_pump(), name="rollout pump")
        try:
            while (chosen := self._ages.take_batch()) is None:
                self._report()
                await self._until_changed(self._pump)
        except asyncio.CancelledError:
            self._is_hurried = True
            raise
        groups = [self._finished.pop(index) for index in chosen]
        self.collector.cut(groups, reject_rest=None)
        self._length_bias.trained(groups)
        self.is_complete = True
        self._report()
        return sorted(groups, key=lambda group: group.group_index)

    def begin_step(self, step: int) -> None:
        """The batch of the step before was taken: what happens from now on counts for `step`."""
        waiting, self._step = list(self._finished.values()), step
        self._started = time.monotonic()
        self._parts = self._parts_of(step, self._ages.version)
        self._parts.runner.context.usage.begin()
        self.collector = self._new_collector()
        self.collector.submitted(len(self._tasks))
        for group in waiting:
            self.collector.offer_ready(group)
        self._wakes.put_nowait(None)

    def weights_changed(self, version: int) -> None:
        """Weights of `version` are served from now on: more groups may be admitted."""
        self._ages.trained(version)
        self._parts = self._parts_of(self._step, version)
        self._wakes.put_nowait(None)

    def finished_groups(self) -> list[Group]:
        """Groups that no batch has taken yet."""
        return list(self._finished.values())

    def prompts_in_flight(self) -> list[Group]:
        """The prompts of the groups that are being answered, afresh: for a checkpoint."""
        prompts = [Group(group.group_index, list(group.samples)) for group in self._tasks.values()]
        for group in prompts:
            restart_group(group)
        return prompts

    async def stop(self) -> None:
        """End the pump and everything in flight; see `Round.stop`.

        Requests are cancelled, not waited for: their prompts start afresh whatever they have.
        """
        self._is_hurried = True
        if self._pump is not None:
            await end_all([self._pump])
            self._pump = None
        await super().stop()

    def leftover(self) -> list[Group]:
        """Finished groups that no batch took."""
        return self.finished_groups()

    def metrics(self) -> dict[str, float]:
        """What happened since the step began, and how far ahead the rollouts are."""
        return round_metrics(self.collector, self._parts.runner, self._started) | {
            "rollout/max_requests_in_flight": float(self._parts.runner.context.gate.high_water),
            "rollout/live_groups": float(self._ages.num_live),
            "rollout/length_bias": self._length_bias.value,
        }

    async def _run_pump(self) -> None:
        while True:
            await self._admit()
            ended = await self._wakes.get()
            if ended is not None and ended in self._tasks:
                self._settle(ended)
                self._changed.set()

    async def _until_changed(self, pump: asyncio.Task[None]) -> None:
        self._changed.clear()
        waiter = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({waiter, pump}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if pump.done():
            pump.result()

    async def _admit(self) -> None:
        """Submit what the gate admits, a few at a time; a batch may be taken in between."""
        per_turn = max(1, ATTEMPTS_PER_TURN // self._config.n_samples_per_prompt)
        while (count := min(per_turn, self._ages.num_to_admit())) > 0:
            self.collector.asked_for(count)
            groups = self._parts.supply.take(count)
            self.collector.submitted(len(groups))
            for group in groups:
                self._ages.admit(group.group_index)
                self._length_bias.issued(group.group_index)
                self._start(group).add_done_callback(self._wakes.put_nowait)
            await asyncio.sleep(0)

    def _book(self, group: Group, verdict: Verdict) -> None:
        super()._book(group, verdict)
        self._length_bias.ended(group)
        if verdict.keep:
            self._ages.finish(group.group_index)
            self._finished[group.group_index] = group
        else:
            self._ages.drop(group.group_index)

    def _fail(self, group: Group, reason: str) -> None:
        self._ages.drop(group.group_index)
        self._length_bias.ended(group)
        super()._fail(group, reason)

    def _return(self, group: Group) -> None:
        self._ages.drop(group.group_index)
        super()._return(group)

    def _restore(self) -> None:
        """Finished groups of an earlier process count by the age of their oldest token.

        One that could make another miss its deadline goes back to the source as a prompt.
        """
        by_age = sorted(
            (self._oldest_version(group), group.group_index, group)
            for group in self._parts.supply.take_ready()
        )
        for version, index, group in by_age:
            if self._ages.restore(index, version):
                self._finished[index] = group
                self.collector.offer_ready(group)
                self._length_bias.issued(index)
                self._length_bias.ended(group)
            else:
                self._parts.supply.start_afresh(group)

    def _oldest_version(self, group: Group) -> int:
        versions = [v for sample in group.samples if (v := sample.oldest_version) is not None]
        return min(versions, default=self._ages.version)

    def _new_collector(self) -> Collector:
        """It only counts: which groups make the batch is the staleness gate's to say."""
        limits = limits_of(self._parts)
        num_ahead = self._config.max_staleness  # batches that the first step asks for as well
        return Collector(
            replace(limits, target=NEVER_FULL, max_refills=limits.max_refills + num_ahead)
        )
