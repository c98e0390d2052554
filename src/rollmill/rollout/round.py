"""The life of one batch: the asyncio shell around the pure `Collector`.

It submits groups, hands what happens to the collector and keeps the books. When the batch is full
(or cannot be filled) it stops what is left. Afterwards no task is left, and every group it took
from the source is accepted, surplus, back at the source, or booked with the reason why it was
rejected or failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import State
from rollmill.errors import RolloutError
from rollmill.filters import KEEP, DynamicFilter, Verdict
from rollmill.rollout.books import Books
from rollmill.rollout.collector import CollectLimits, Collector, count_reasons
from rollmill.rollout.fresh import is_done, restart_group
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.group import GroupRunner, first_line
from rollmill.rollout.supply import StepSupply
from rollmill.rollout.tasks import end_all
from rollmill.rollout.usage import Loss, num_engine_tokens
from rollmill.sample import Group, Sample, Status
from rollmill.telemetry.progress import Progress, ProgressListener

logger = logging.getLogger(__name__)

ATTEMPTS_PER_TURN = 32
"""Attempts started or settled in one turn of the event loop: each takes a part of a millisecond,
and thousands of them in one turn would keep everything else waiting."""


@dataclass(frozen=True)
class RoundParts:
    """What one round works with."""

    config: RolloutConfig
    runner: GroupRunner
    dynamic_filter: DynamicFilter
    supply: StepSupply
    books: Books
    listener: ProgressListener
    is_ranked: bool


class Round:
    """Collects one batch: `fill`, then always `stop`."""

    def __init__(self, parts: RoundParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._started = time.monotonic()
        self._tasks: dict[asyncio.Task[Group], Group] = {}
        self._done: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        self._may_take_back = parts.config.filters.when_short == "keep"
        self._is_hurried = False
        self._groups_per_turn = max(1, ATTEMPTS_PER_TURN // parts.config.n_samples_per_prompt)
        self.is_complete = False
        self.collector = Collector(limits_of(parts))

    async def fill(self) -> None:
        """Submit and settle groups until the batch is full.

        Raises:
            RolloutError: too many groups failed or were rejected.
        """
        try:
            for group in self._parts.supply.take_ready():
                self.collector.offer_ready(group)
            while not self.collector.is_done:
                await self._submit(self.collector.num_to_submit())
                if self.collector.is_done:
                    break
                self._report()
                self._settle(await self._done.get())
        except asyncio.CancelledError:
            self._is_hurried = True
            raise
        self.is_complete = True
        self._report()

    async def stop(self) -> None:
        """End what is still running; afterwards no task is left and every group is booked.

        Requests are aborted and come back with what they have, until `abort_timeout_s`; what is
        still running then is cancelled. When the caller was cancelled nothing is waited for.
        """
        self._parts.runner.context.gate.close()
        try:
            if not self._is_hurried:
                context = self._parts.runner.context
                await abort_requests(context, self._tasks, self._config.abort_timeout_s)
        finally:
            try:
                await end_all(self._tasks)
            finally:
                try:
                    await self._settle_all_stopped()
                finally:
                    self._book_deferred()

    def leftover(self) -> list[Group]:
        """Finished groups that this batch does not use: ready for the next one."""
        collector = self.collector
        unused = [] if self.is_complete else collector.accepted
        return [*unused, *collector.surplus]

    def metrics(self) -> dict[str, float]:
        """What it took to fill the batch."""
        gate = self._parts.runner.context.gate
        return round_metrics(self.collector, self._parts.runner, self._started) | {
            "rollout/max_requests_in_flight": float(gate.high_water)
        }

    async def _submit(self, count: int) -> None:
        while count > 0:
            groups = self._parts.supply.take(min(count, self._groups_per_turn))
            self.collector.submitted(len(groups))
            for group in groups:
                self._start(group).add_done_callback(self._done.put_nowait)
            count -= len(groups)
            await asyncio.sleep(0)

    def _start(self, group: Group) -> asyncio.Task[Group]:
        run = self._parts.runner.run(group)
        task = asyncio.create_task(run, name=f"group {group.group_index}")
        self._tasks[task] = group
        return task

    def _settle(self, task: asyncio.Task[Group]) -> None:
        """Book a group whose task ended by itself."""
        group = self._tasks.pop(task)
        reason = failure_of(task, group, self._config.on_failed_group)
        verdict: Verdict = KEEP
        if reason is None:
            try:
                verdict = self._parts.dynamic_filter(group)
            except Exception as error:  # noqa: BLE001 - a custom filter's fault costs its group
                reason = f"dynamic filter: {first_line(error)}"
        if reason is not None:
            self._fail(group, reason)
        else:
            self._book(group, verdict)

    def _fail(self, group: Group, reason: str) -> None:
        reason = " ".join(reason.split())[:500]
        self._parts.books.record(group, State.FAILED, reason)
        self.collector.failed_group(group, reason)

    def _book(self, group: Group, verdict: Verdict) -> None:
        if verdict.keep:
            self._parts.books.record(group, State.READY)
        elif not self._may_take_back:
            self._parts.books.record(group, State.REJECTED, verdict.reason or "rejected")
        self.collector.finished(group, verdict)

    def _book_deferred(self) -> None:
        """Rejected groups that the batch could have taken back: now it is known which it did."""
        if not self._may_take_back:
            return
        books = self._parts.books
        for group, reason in self.collector.rejected:
            books.record(group, State.REJECTED, reason)
        for group in self.collector.accepted:
            if books.state_of(group) is State.IN_FLIGHT:
                books.record(group, State.READY)

    async def _settle_all_stopped(self) -> None:
        """Book what is left, a few groups per turn of the event loop; all of it, cancelled or not.

        A cancellation meanwhile makes it hurry and is raised at the end.
        """
        cancelled: asyncio.CancelledError | None = None
        num_failed = len(self.collector.failed)
        for number, task in enumerate(list(self._tasks), start=1):
            self._settle_stopped(task)
            if number % self._groups_per_turn == 0 and cancelled is None and not self._is_hurried:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError as error:
                    cancelled = error
        if failed := self.collector.failed[num_failed:]:
            reasons = count_reasons(reason for _, reason in failed)
            logger.warning("%d groups failed while the batch ended: %s", len(failed), reasons)
        if cancelled is not None:
            raise cancelled

    def _settle_stopped(self, task: asyncio.Task[Group]) -> None:
        """Book a group that was running when the batch ended: finished after all, or not."""
        group = self._tasks[task]
        is_broken = task.done() and not task.cancelled() and task.exception() is not None
        is_lost = group.has_failed and self._config.on_failed_group == "replace"
        if task.done() and (is_broken or is_lost or all(map(is_done, group.samples))):
            try:
                self._settle(task)
            except RolloutError as error:  # the limits are those of filling; it is over
                logger.debug("after the batch ended: %s", error)
            return
        del self._tasks[task]
        if not task.done():
            logger.error("group %d cannot be stopped; its prompt starts afresh", group.group_index)
            group = Group(group.group_index, group.samples)
            self._parts.runner.context.usage.lose(Loss.ABORTED, restart_group(group))
        self._return(group)

    def _return(self, group: Group) -> None:
        """Give an unfinished group back."""
        self._parts.supply.give_back(group)
        self.collector.returned()

    def _report(self) -> None:
        collector = self.collector
        self._parts.listener(
            Progress(
                target=self._config.batch_size,
                accepted=len(collector.accepted),
                rejected=len(collector.rejected),
                failed=len(collector.failed),
                in_flight=collector.num_in_flight,
                tokens=self._parts.runner.context.usage.num_generated,
                seconds=time.monotonic() - self._started,
                reasons=dict(collector.reasons),
            )
        )


async def abort_requests(
    context: GenerateContext, tasks: Collection[asyncio.Task[Group]], deadline_s: float
) -> None:
    """Stop the engines' work on our requests and wait for the tasks, no longer than the deadline.

    Requests that nobody waits for any more are stopped as well: user code may have left some.
    """
    if not tasks and not context.gate.num_inside:
        return
    abort = asyncio.ensure_future(context.engines.abort_all(deadline_s))
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s)
    finally:
        await end_all([abort], first_wait_s=deadline_s if context.gate.num_inside else 1.0)
    is_known = abort.done() and not abort.cancelled()
    if is_known and (error := abort.exception()) is not None:
        logger.warning("aborting on the engines: %s", error)


def limits_of(parts: RoundParts) -> CollectLimits:
    """The collector's limits, from the configuration."""
    config = parts.config
    return CollectLimits(
        target=config.submit_size if parts.is_ranked else config.batch_size,
        submit_size=config.submit_size,
        max_consecutive_rejections=config.filters.max_consecutive_rejections,
        max_refills=config.filters.max_refills,
        when_short=config.filters.when_short,
        max_failure_rate=config.max_failure_rate,
        filter_name=parts.dynamic_filter.name,
    )


def round_metrics(collector: Collector, runner: GroupRunner, started: float) -> dict[str, float]:
    """Groups by where they went, reasons, and tokens made and lost since `started`."""
    seconds = time.monotonic() - started
    usage = runner.context.usage
    lost = {why: usage.lost[why] for why in (Loss.RETRIED, Loss.ABORTED, Loss.STALE)}
    lost[Loss.REJECTED] = _tokens(collector.rejected)
    lost[Loss.FAILED] = _tokens(collector.failed)
    figures = {f"rollout/groups/{k}": float(v) for k, v in collector.balance().items()}
    figures |= {f"rollout/rejected/{k}": float(v) for k, v in collector.reasons.items() if v}
    figures |= {f"rollout/wasted_tokens/{why}": float(n) for why, n in lost.items()}
    return figures | {
        "rollout/seconds": seconds,
        "rollout/generated_tokens": float(usage.num_generated),
        "rollout/tokens_per_second": usage.num_generated / max(seconds, 1e-9),
        "rollout/wasted_tokens": float(sum(lost.values())),
    }


def failure_of(task: asyncio.Task[Group], group: Group, policy: str) -> str | None:
    """Why a group that ran to its end cannot be used; None when it can.

    With the policy `keep` a group with some FAILED samples can be used without them: they are taken
    out of the loss here.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("group %d: %s", group.group_index, error, exc_info=error)
        return first_line(error)
    failed = [sample for sample in group.samples if sample.status is Status.FAILED]
    if failed and (policy == "replace" or len(failed) == len(group.samples)):
        return failed[0].failure or "unknown"
    if task.cancelled():
        return "CancelledError: the group's task was cancelled from outside"
    unjudged = _first(group.samples, lambda sample: not is_done(sample))
    if unjudged is not None:
        return f"sample {unjudged.index} was left {unjudged.status.value} without a reward"
    leave_failed_out(group)
    return None


def leave_failed_out(group: Group) -> None:
    """Take the FAILED samples of a group that is used without them out of the loss."""
    for sample in group.samples:
        if sample.status is Status.FAILED:
            sample.in_loss = False


def _first(samples: Sequence[Sample], condition: Callable[[Sample], bool]) -> Sample | None:
    return next((sample for sample in samples if condition(sample)), None)


def _tokens(turned_down: Sequence[tuple[Group, str]]) -> int:
    return sum(num_engine_tokens(s) for group, _ in turned_down for s in group.samples)
