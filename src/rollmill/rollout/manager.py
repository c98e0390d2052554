"""Batches of rollouts, one per call: what carries over from step to step, and the batch's hooks.

The work of one batch is `Round` (or the user's own rollout function, in `OwnRound`). This class
owns what outlives it: finished groups that no batch has used yet. Whatever happens in `collect`,
every group it touched is afterwards in the batch, ready for the next one, back at the source, or
in the ledger with the reason why it was rejected or failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import Ledger, State
from rollmill.data.source import DataSource
from rollmill.errors import HookError
from rollmill.filters import DynamicFilter
from rollmill.filters.over_sampling import Ranking
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.batch_hooks import apply_batch_hooks, extra_metrics
from rollmill.rollout.books import Books
from rollmill.rollout.collector import Collector
from rollmill.rollout.custom import OwnRound
from rollmill.rollout.garbage import only_small_collections
from rollmill.rollout.group import GroupRunner
from rollmill.rollout.hooks import LoadedHooks
from rollmill.rollout.metrics import batch_metrics
from rollmill.rollout.round import Round, RoundParts
from rollmill.rollout.supply import StepSupply
from rollmill.sample import Group
from rollmill.sample_codec import decode_group, encode_group
from rollmill.telemetry.progress import ProgressListener, ignore_progress

OVER_SAMPLING_REASON = "over_sampling_rank"


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


class _AnyRound(Protocol):
    collector: Collector

    async def fill(self) -> None: ...
    async def stop(self) -> None: ...
    def leftover(self) -> list[Group]: ...
    def metrics(self) -> dict[str, float]: ...


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
        self._ready: list[Group] = []

    @property
    def num_ready(self) -> int:
        """Finished groups that wait for the next batch."""
        return len(self._ready)

    async def collect(self, *, step: int, version: int) -> RolloutBatch:
        """One full batch, written by weights of `version` (or, within max_staleness, older ones).

        Raises:
            RolloutError: too many groups failed, or a filter rejects everything.
            HookError: a function of the user's broke its contract.
        """
        books = Books(self._parts.ledger, step)
        round_ = self._round(step, version, books)
        self._parts.runner.context.gate.open()
        try:
            await self._run(round_)
            batch = self._finish(round_.collector, books, version)
        except BaseException:
            kept = {id(group) for group in self._ready}
            self._ready += [g for g in round_.collector.accepted if id(g) not in kept]
            raise
        batch.metrics = round_.metrics() | batch.metrics
        self._parts.ledger.flush()
        return batch

    async def _run(self, round_: _AnyRound) -> None:
        """Fill and stop the round, and keep what it leaves."""
        with only_small_collections():
            try:
                await round_.fill()
            finally:
                try:
                    await round_.stop()
                finally:
                    self._ready = round_.leftover()
                    self._parts.ledger.flush()

    def weights_changed(self, version: int) -> None:
        """Engines serve weights of `version` now; matters only to rollouts that never pause."""

    async def close(self) -> None:
        """End what goes on between batches: nothing, here."""

    def consumed(self, batch: RolloutBatch, step: int) -> None:
        """The batch was trained on at `step`: final for all its groups."""
        books = Books(self._parts.ledger, step)
        for group in batch.groups:
            books.record(group, State.CONSUMED)
        self._parts.ledger.flush()

    def state_dict(self) -> dict[str, object]:
        """Surplus groups and the source's position, as msgpack values."""
        return {
            "source": self._parts.source.state_dict(),
            "ready": [encode_group(group) for group in self._ready],
            "ledger_position": self._parts.ledger.position(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint: books, source and surplus groups.

        Prompts that were in flight come first, also when those rollouts never paused and these do.
        """
        self._parts.ledger.rewind(int(state["ledger_position"]))
        self._parts.source.load_state_dict(state["source"])
        self._ready = [decode_group(data) for data in state["ready"]]
        for data in state.get("in_flight", ()):
            group = decode_group(data)
            self._parts.ledger.record(group.group_index, State.ISSUED)
            self._parts.source.give_back([group])

    def forget_everything(self) -> None:
        """Before a run without a checkpoint: whatever a killed one booked did not happen."""
        self._parts.ledger.rewind(0)

    def _round(self, step: int, version: int, books: Books) -> _AnyRound:
        self._parts.runner.context.usage.begin()
        parts = self._round_parts(step, version, books)
        own = self._parts.hooks.rollout
        return Round(parts) if own is None else OwnRound(parts, own, step=step, version=version)

    def _round_parts(self, step: int, version: int, books: Books) -> RoundParts:
        usage = self._parts.runner.context.usage
        supply = StepSupply(self._config, self._parts.source, books, usage, version, self._ready)
        is_replaced = (
            self._config.on_failed_group == "replace" and self._parts.hooks.rollout is None
        )
        return RoundParts(
            config=self._config,
            runner=self._parts.runner.at_step(step, ends_on_failure=is_replaced),
            dynamic_filter=self._parts.dynamic_filter,
            supply=supply,
            books=books,
            listener=self._listener,
            is_ranked=self._parts.ranking is not None,
        )

    def _finish(self, collector: Collector, books: Books, version: int) -> RolloutBatch:
        """Rank and cut, order by group, run the hooks on the batch, and count."""
        if self._parts.ranking is not None and self._parts.hooks.rollout is None:
            self._rank_and_cut(self._parts.ranking, collector, books)
        groups = sorted(collector.accepted, key=lambda g: g.group_index)
        rejected = sorted(collector.rejected, key=lambda pair: pair[0].group_index)
        failed = sorted(collector.failed, key=lambda pair: pair[0].group_index)
        metrics = batch_metrics(groups, version, self._parts.reward_key)
        turned_down = [group for group, _ in (*rejected, *failed)]
        trained = apply_batch_hooks(self._parts.hooks, groups, turned_down)
        metrics |= extra_metrics(self._parts.hooks.log_rollout, groups, "rollout.hooks.log_rollout")
        return RolloutBatch(trained, rejected, failed, metrics)

    def _rank_and_cut(self, ranking: Ranking, collector: Collector, books: Books) -> None:
        """Keep the first `batch_size` groups of the ranking; the rest as configured."""
        size = self._config.batch_size
        ranked = list(ranking(sorted(collector.accepted, key=lambda g: g.group_index)))
        if len(ranked) < size:
            raise HookError(
                "an over-sampling filter kept fewer groups than a batch holds",
                where="rollout.filters.over_sampling",
                expected=f"at least {size} of the {len(collector.accepted)} groups, best first",
                found=str(len(ranked)),
                fix="to turn groups down for good, use a dynamic filter",
            )
        is_rejected = self._config.filters.over_sampling_rest == "reject"
        kept = {id(group) for group in ranked[:size]}
        rest = [group for group in collector.accepted if id(group) not in kept]
        collector.cut(ranked[:size], reject_rest=OVER_SAMPLING_REASON if is_rejected else None)
        if not is_rejected:
            self._ready += rest
            return
        for group in rest:
            books.record(group, State.REJECTED, OVER_SAMPLING_REASON)
