"""Collecting batches: the asyncio shell around the pure `Collector`.

It submits groups, hands what happens to the collector, keeps the books in the ledger, and when the
batch is full aborts what is left. No task outlives the `collect` that started it, and every group
it took from the source is afterwards in the batch, ready for the next one, back at the source,
or in the ledger with the reason why it was rejected or failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import Ledger, State
from rollmill.data.source import DataSource
from rollmill.errors import RolloutError
from rollmill.filters import DynamicFilter, Verdict
from rollmill.filters.over_sampling import Ranking
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.collector import CollectLimits, Collector
from rollmill.rollout.generate import mask_older_than
from rollmill.rollout.group import GroupRunner
from rollmill.rollout.hooks import LoadedHooks
from rollmill.rollout.metrics import batch_metrics
from rollmill.sample import Group, Sample, Status
from rollmill.sample_codec import decode_group, encode_group
from rollmill.telemetry.progress import Progress, ProgressListener, ignore_progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutParts:
    """What a rollout manager works with."""

    source: DataSource
    ledger: Ledger
    runner: GroupRunner
    dynamic_filter: DynamicFilter
    ranking: Ranking | None
    hooks: LoadedHooks
    reward_key: str | None


class RolloutManager:
    """Collects one batch per call, and carries surplus and unfinished groups to the next.

    Args:
        config: the `rollout` section.
        parts: source, ledger, runner, filters and hooks.
        listener: told about progress, for live views.
    """

    def __init__(
        self,
        config: RolloutConfig,
        parts: RolloutParts,
        listener: ProgressListener = ignore_progress,
    ) -> None:
        self._config = config
        self._parts = parts
        self._listener = listener
        self._gate = parts.runner.context.gate
        self._ready: list[Group] = []

    @property
    def num_ready(self) -> int:
        """Finished groups that wait for the next batch."""
        return len(self._ready)

    async def collect(self, *, step: int, version: int) -> RolloutBatch:
        """One full batch, written by weights of `version` (or, within max_staleness, older ones).

        Raises:
            RolloutError: too many groups failed, or a filter rejects everything.
        """
        round_ = _Round(self, step, version)
        self._gate.open()
        try:
            await round_.fill()
        finally:
            await round_.abort()
            self._ready = round_.leftover()
            self._parts.ledger.flush()
        batch = self._finish(round_.collector, step, version)
        batch.metrics |= round_.metrics()
        return batch

    def consumed(self, batch: RolloutBatch, step: int) -> None:
        """The batch was trained on at `step`: final for all its groups."""
        for group in batch.groups:
            self._record(group, State.CONSUMED, step)
        self._parts.ledger.flush()

    def state_dict(self) -> dict[str, object]:
        """Surplus groups and the source's position, as msgpack values."""
        return {
            "source": self._parts.source.state_dict(),
            "ready": [encode_group(group) for group in self._ready],
            "ledger_position": self._parts.ledger.position(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go back to a checkpoint: books, source and surplus groups."""
        self._parts.ledger.rewind(int(state["ledger_position"]))  # type: ignore[call-overload]
        self._parts.source.load_state_dict(state["source"])  # type: ignore[arg-type]
        self._ready = [decode_group(data) for data in state["ready"]]  # type: ignore[attr-defined]

    def forget_everything(self) -> None:
        """Before a run without a checkpoint: whatever a killed one booked did not happen."""
        self._parts.ledger.rewind(0)

    def take_fresh_or_waiting(self, count: int, step: int, version: int) -> list[Group]:
        """`count` groups from the source, booked as in flight; stale tokens dealt with."""
        groups = self._parts.source.take(count)
        for group in groups:
            if self._parts.ledger.state_of_live(group.group_index) is None:
                self._record(group, State.ISSUED, step)
            if self._deal_with_stale(group, version):
                self._record(group, State.ISSUED, step)
            self._record(group, State.IN_FLIGHT, step)
        return groups

    def take_ready(self, step: int, version: int) -> list[Group]:
        """Surplus groups that may still be trained on, in order; stale prompts start afresh."""
        usable = []
        for group in sorted(self._ready, key=lambda g: g.group_index):
            if self._deal_with_stale(group, version):
                self._record(group, State.ISSUED, step)
                self._parts.source.give_back([group])
            else:
                usable.append(group)
        self._ready = []
        return usable

    def _deal_with_stale(self, group: Group, version: int) -> bool:
        """True when the group was too old and its prompt starts afresh."""
        oldest_allowed = version - self._config.max_staleness
        oldest = min(
            (v for s in group.samples if (v := s.oldest_version) is not None), default=None
        )
        if oldest is None or oldest >= oldest_allowed:
            return False
        if self._config.mask_off_policy:
            for sample in group.samples:
                mask_older_than(sample, oldest_allowed)
            return False
        restart_group(group)
        return True

    def _finish(self, collector: Collector, step: int, version: int) -> RolloutBatch:
        """Rank and cut, order by group, run the hooks on the batch, and count."""
        groups = sorted(collector.accepted, key=lambda g: g.group_index)
        if self._parts.ranking is not None:
            ranked = list(self._parts.ranking(groups))
            groups = sorted(ranked[: self._config.batch_size], key=lambda g: g.group_index)
            self._put_behind(collector, groups, step)
        hooks = self._parts.hooks
        if hooks.sample_filter is not None:
            hooks.sample_filter(groups)
        if hooks.reward_post_process is not None:
            hooks.reward_post_process(groups)
        batch = RolloutBatch(groups, collector.rejected, collector.failed)
        if hooks.all_samples is not None:
            turned_down = [group for group, _ in (*batch.rejected, *batch.failed)]
            hooks.all_samples(groups, turned_down)
        batch.metrics = batch_metrics(groups, version, self._parts.reward_key)
        if hooks.log_rollout is not None:
            batch.metrics |= hooks.log_rollout(groups)
        return batch

    def _put_behind(self, collector: Collector, kept: list[Group], step: int) -> None:
        """Groups that an over-sampling filter ranked behind the batch."""
        kept_indices = {group.group_index for group in kept}
        for group in collector.accepted:
            if group.group_index in kept_indices:
                continue
            if self._config.filters.over_sampling_rest == "ready":
                self._ready.append(group)
            else:
                collector.rejected.append((group, "over_sampling_rank"))
                self._record(group, State.REJECTED, step, "over_sampling_rank")

    def _record(self, group: Group, state: State, step: int, reason: str | None = None) -> None:
        self._parts.ledger.record(
            group.group_index,
            state,
            step=step,
            reason=reason,
            num_tokens=group.num_response_tokens,
        )


class _Round:
    """The life of one `collect`."""

    def __init__(self, manager: RolloutManager, step: int, version: int) -> None:
        config = manager._config
        self._manager = manager
        self._config = config
        self._parts = manager._parts
        self._step = step
        self._version = version
        self._started = time.monotonic()
        self._tasks: dict[asyncio.Task[Group], Group] = {}
        self._done: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        self._tokens = 0
        self._dropped_tokens = 0
        self._may_take_back = config.filters.when_short == "keep"
        is_ranked = manager._parts.ranking is not None
        self.collector = Collector(
            CollectLimits(
                target=config.submit_size if is_ranked else config.batch_size,
                submit_size=config.submit_size,
                max_consecutive_rejections=config.filters.max_consecutive_rejections,
                when_short=config.filters.when_short,
                max_failure_rate=config.max_failure_rate,
                filter_name=manager._parts.dynamic_filter.name,
            )
        )
        self._is_complete = False

    async def fill(self) -> None:
        """Submit and settle groups until the batch is full."""
        for group in self._manager.take_ready(self._step, self._version):
            self.collector.offer_ready(group)
        while not self.collector.is_done:
            self._submit(self.collector.num_to_submit())
            self._report()
            task = await self._done.get()
            self._settle(task)
        self._is_complete = True
        self._report()

    async def abort(self) -> None:
        """Stop what is still running; afterwards no task is left and every group is booked."""
        gate = self._manager._gate
        gate.close()
        if self._tasks:
            deadline = self._config.abort_timeout_s
            abort = asyncio.create_task(self._parts.runner.context.engines.abort_all(deadline))
            await asyncio.wait(self._tasks, timeout=deadline)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(abort, *self._tasks, return_exceptions=True)
            if not abort.cancelled() and (error := abort.exception()) is not None:
                logger.warning("aborting on the engines: %s", error)
        for task in list(self._tasks):
            self._settle_after_abort(task)
        self._book_deferred()

    def leftover(self) -> list[Group]:
        """Finished groups that this batch does not use: ready for the next one."""
        collector = self.collector
        return collector.surplus if self._is_complete else collector.accepted + collector.surplus

    def metrics(self) -> dict[str, float]:
        """What it took to fill the batch."""
        seconds = time.monotonic() - self._started
        turned_down = [group for group, _ in (*self.collector.rejected, *self.collector.failed)]
        wasted = self._dropped_tokens + sum(group.num_response_tokens for group in turned_down)
        figures = {f"rollout/groups/{k}": float(v) for k, v in self.collector.balance().items()}
        figures |= {
            f"rollout/rejected/{reason}": float(count)
            for reason, count in self.collector.reasons.items()
        }
        return figures | {
            "rollout/seconds": seconds,
            "rollout/generated_tokens": float(self._tokens),
            "rollout/tokens_per_second": self._tokens / max(seconds, 1e-9),
            "rollout/wasted_tokens": float(wasted),
            "rollout/max_requests_in_flight": float(self._manager._gate.high_water),
        }

    def _submit(self, count: int) -> None:
        if not count:
            return
        groups = self._manager.take_fresh_or_waiting(count, self._step, self._version)
        for group in groups:
            self._tokens -= group.num_response_tokens  # written in an earlier step
            task = asyncio.create_task(
                self._parts.runner.run(group), name=f"group {group.group_index}"
            )
            self._tasks[task] = group
            task.add_done_callback(self._done.put_nowait)
        self.collector.submitted(len(groups))

    def _settle(self, task: asyncio.Task[Group]) -> None:
        group = self._tasks.pop(task)
        self._tokens += group.num_response_tokens
        reason = self._failure(task, group)
        if reason is not None:
            self._fail(group, reason)
            return
        try:
            verdict = self._parts.dynamic_filter(group)
        except Exception as error:  # noqa: BLE001 - policy: a custom filter's fault costs its group
            self._fail(group, f"dynamic filter: {type(error).__name__}: {error}")
            return
        self._book(group, verdict)

    def _failure(self, task: asyncio.Task[Group], group: Group) -> str | None:
        """Why a group that ran to its end cannot be used; None when it can."""
        if (error := task.exception()) is not None:
            logger.error("group %d: %s", group.group_index, error, exc_info=error)
            return f"{type(error).__name__}: {error}"
        unjudged = [s for s in group.samples if not is_done(s)]
        if unjudged:
            return (
                f"sample {unjudged[0].index} was left {unjudged[0].status.value} without a reward"
            )
        failed = [s for s in group.samples if s.status is Status.FAILED]
        keeps_rest = self._config.on_failed_group == "keep" and len(failed) < len(group.samples)
        if failed and keeps_rest:
            for sample in failed:
                sample.in_loss = False
            return None
        return failed[0].failure or "unknown" if failed else None

    def _fail(self, group: Group, reason: str) -> None:
        reason = " ".join(reason.split())[:500]
        self._manager._record(group, State.FAILED, self._step, reason)
        self.collector.failed_group(group, reason)

    def _book(self, group: Group, verdict: Verdict) -> None:
        if verdict.keep:
            self._manager._record(group, State.READY, self._step)
        elif not self._may_take_back:
            self._manager._record(group, State.REJECTED, self._step, verdict.reason)
        self.collector.finished(group, verdict)

    def _book_deferred(self) -> None:
        """Rejected groups that the batch could have taken back: now it is known which it did."""
        if not self._may_take_back:
            return
        for group, reason in self.collector.rejected:
            self._manager._record(group, State.REJECTED, self._step, reason)
        for group in self.collector.accepted:
            if self._parts.ledger.state_of_live(group.group_index) is State.IN_FLIGHT:
                self._manager._record(group, State.READY, self._step)

    def _settle_after_abort(self, task: asyncio.Task[Group]) -> None:
        """Book a group whose task ended because of the abort (or just before it)."""
        group = self._tasks[task]
        has_ended = not task.cancelled() and task.exception() is None
        if has_ended and all(map(is_done, group.samples)):
            try:
                self._settle(task)
            except RolloutError as error:
                logger.warning("after the batch was full: %s", error)
            return
        del self._tasks[task]
        self._tokens += group.num_response_tokens
        if self._config.partial_rollout:
            self._manager._record(group, State.WAITING, self._step)
        else:
            self._dropped_tokens += group.num_response_tokens
            restart_group(group)
            self._manager._record(group, State.ISSUED, self._step)
        self._parts.source.give_back([group])
        self.collector.returned()

    def _report(self) -> None:
        collector = self.collector
        self._manager._listener(
            Progress(
                target=self._config.batch_size,
                accepted=len(collector.accepted),
                rejected=len(collector.rejected),
                failed=len(collector.failed),
                in_flight=collector.num_in_flight,
                tokens=self._tokens,
                seconds=time.monotonic() - self._started,
                reasons=dict(collector.reasons),
            )
        )


def is_done(sample: Sample) -> bool:
    """Whether a sample needs nothing more: finished and judged, or FAILED."""
    is_judged = sample.reward is not None
    return sample.status is Status.FAILED or (sample.status.is_finished and is_judged)


def restart_group(group: Group) -> None:
    """Back to a fresh prompt: one pending sample per attempt."""
    group.samples = [siblings[0] for siblings in group.attempts()]
    for sample in group.samples:
        sample.restart()
