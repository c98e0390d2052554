"""Batches of answers that are recorded in the data: no engine writes and no grader judges.

Any `DataSource` that gives *finished* groups can be replayed: demonstrations (SFT), or answers
prepared for offline distillation. A group goes the way of a generated one (issued, ready, consumed
in the ledger; sample hook, dynamic filter, batch hooks, figures), only at once.

Invariant: after `collect`, every group it took is in the batch, or in the ledger with the reason
why it was rejected or failed. When `collect` raises, the run ends, and a resume goes back to the
source's position in the checkpoint.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import Ledger, State
from rollmill.data.source import DataSource
from rollmill.errors import HookError
from rollmill.filters import KEEP, DynamicFilter, Verdict
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.batch_hooks import apply_batch_hooks, extra_metrics
from rollmill.rollout.books import Books
from rollmill.rollout.collector import CollectLimits, Collector
from rollmill.rollout.group import first_line
from rollmill.rollout.hooks import LoadedHooks
from rollmill.rollout.metrics import batch_metrics
from rollmill.rollout.round import leave_failed_out
from rollmill.rollout.supply import take_exactly
from rollmill.sample import Group, Sample, Status
from rollmill.telemetry.progress import Progress, ProgressListener, ignore_progress


@dataclass(frozen=True)
class ReplayParts:
    """What a replay works with."""

    source: DataSource
    ledger: Ledger
    dynamic_filter: DynamicFilter
    hooks: LoadedHooks
    reward_key: str | None


class ReplayManager:
    """Takes each batch from the source as it is recorded there; a `Rollouts`.

    Args:
        config: the `rollout` section.
        parts: source, ledger, filter and hooks.
        listener: told about progress, for live views.
    """

    def __init__(
        self,
        config: RolloutConfig,
        parts: ReplayParts,
        listener: ProgressListener = ignore_progress,
    ) -> None:
        self._config = config
        self._parts = parts
        self._listener = listener

    async def collect(self, *, step: int, version: int) -> RolloutBatch:
        """The next `batch_size` groups that pass the filter.

        Raises:
            HookError: the source gave something else than finished groups, or a function of the
                user's broke its contract.
            RolloutError: too many groups are FAILED in the data, or the filter rejects everything.
        """
        started = time.monotonic()
        books = Books(self._parts.ledger, step)
        collector = Collector(_limits_of(self._config, self._parts.dynamic_filter.name))
        try:
            while not collector.is_done:
                for group in self._take(collector.num_to_submit()):
                    books.record(group, State.ISSUED)
                    collector.submitted(1)
                    await self._settle(group, collector, books)
            self._report(collector, started)
            batch = self._finish(collector, version)
        finally:
            self._parts.ledger.flush()
        figures = {f"rollout/groups/{k}": float(v) for k, v in collector.balance().items()}
        figures |= {f"rollout/rejected/{k}": float(v) for k, v in collector.reasons.items() if v}
        figures["rollout/seconds"] = time.monotonic() - started
        batch.metrics = figures | batch.metrics
        return batch

    def consumed(self, batch: RolloutBatch, step: int) -> None:
        """The batch was trained on at `step`: final for all its groups."""
        books = Books(self._parts.ledger, step)
        for group in batch.groups:
            books.record(group, State.CONSUMED)
        self._parts.ledger.flush()

    def weights_changed(self, version: int) -> None:
        """Recorded answers do not depend on the weights."""

    async def close(self) -> None:
        """Nothing goes on between batches."""

    def state_dict(self) -> dict[str, Any]:
        """The source's position and that of the books, as msgpack values."""
        return {
            "source": self._parts.source.state_dict(),
            "ledger_position": self._parts.ledger.position(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint: books and source."""
        self._parts.ledger.rewind(int(state["ledger_position"]))
        self._parts.source.load_state_dict(state["source"])

    def forget_everything(self) -> None:
        """Before a run without a checkpoint: whatever a killed one booked did not happen."""
        self._parts.ledger.rewind(0)

    def _take(self, count: int) -> list[Group]:
        groups = take_exactly(self._parts.source, count)
        for group in groups:
            _check_finished(group, self._config.n_samples_per_prompt)
        return groups

    async def _settle(self, group: Group, collector: Collector, books: Books) -> None:
        """Hook, filter and book one group."""
        for sample in group.samples:
            await self._run_hook(sample)
        reason = self._failure(group)
        verdict: Verdict = KEEP
        if reason is None:
            try:
                verdict = self._parts.dynamic_filter(group)
            except Exception as error:  # noqa: BLE001 - a custom filter's fault costs its group
                reason = f"dynamic filter: {first_line(error)}"
        if reason is not None:
            books.record(group, State.FAILED, reason)
            collector.failed_group(group, reason)
            return
        if verdict.keep:
            books.record(group, State.READY)
        else:
            books.record(group, State.REJECTED, verdict.reason or "rejected")
        collector.finished(group, verdict)

    def _failure(self, group: Group) -> str | None:
        """Why the group cannot be used; FAILED samples of a group that can leave the loss."""
        failed = [sample for sample in group.samples if sample.status is Status.FAILED]
        if not failed:
            return None
        if self._config.on_failed_group == "replace" or len(failed) == len(group.samples):
            return failed[0].failure or "unknown"
        leave_failed_out(group)
        return None

    async def _run_hook(self, sample: Sample) -> None:
        """The sample hook, once: what it raises makes the sample FAILED, as in generation."""
        if self._parts.hooks.sample is None or sample.status is Status.FAILED:
            return
        try:
            pending = self._parts.hooks.sample(sample)
            if inspect.isawaitable(pending):
                await pending
        except Exception as error:  # noqa: BLE001 - policy above
            sample.fail(f"sample hook: {first_line(error)}")

    def _finish(self, collector: Collector, version: int) -> RolloutBatch:
        """Order by group, run the hooks on the batch, and count."""
        hooks = self._parts.hooks
        groups = sorted(collector.accepted, key=lambda g: g.group_index)
        metrics = batch_metrics(groups, version, self._parts.reward_key)
        turned_down = [group for group, _ in (*collector.rejected, *collector.failed)]
        trained = apply_batch_hooks(hooks, groups, turned_down)
        metrics |= extra_metrics(hooks.log_rollout, groups, "rollout.hooks.log_rollout")
        return RolloutBatch(trained, collector.rejected, collector.failed, metrics)

    def _report(self, collector: Collector, started: float) -> None:
        self._listener(
            Progress(
                target=self._config.batch_size,
                accepted=len(collector.accepted),
                rejected=len(collector.rejected),
                failed=len(collector.failed),
                in_flight=0,
                tokens=0,
                seconds=time.monotonic() - started,
                reasons=dict(collector.reasons),
            )
        )


def _limits_of(config: RolloutConfig, filter_name: str) -> CollectLimits:
    return CollectLimits(
        target=config.batch_size,
        submit_size=1,
        max_consecutive_rejections=config.filters.max_consecutive_rejections,
        max_refills=config.filters.max_refills,
        when_short="error",
        max_failure_rate=config.max_failure_rate,
        filter_name=filter_name,
    )


def _check_finished(group: Group, num_attempts: int) -> None:
    """A replayed group has all its answers, or there is nothing to train on."""
    attempts = len(group.attempts())
    if attempts != num_attempts:
        raise HookError(
            "the data holds another number of answers to a prompt than configured",
            where=f"group {group.group_index}",
            expected=f"{num_attempts} (rollout.n_samples_per_prompt)",
            found=str(attempts),
            fix="set rollout.n_samples_per_prompt to the number of recorded answers",
        )
    for sample in group.samples:
        is_empty = sample.status is not Status.FAILED and not sample.segments
        if not sample.status.is_finished or is_empty:
            raise HookError(
                "the data source gave a prompt without its answer",
                where=f"sample {sample.index} of group {group.group_index}",
                expected="finished samples with segments (rollout.source: replay)",
                found=f"status {sample.status.value}, {len(sample.segments)} segments",
                fix="give recorded answers, or set rollout.source: generate",
            )
