"""Batches from a stream: the manager of rollouts that go on while the trainer trains."""

from __future__ import annotations

from rollmill.config.rollout import RolloutConfig
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.books import Books
from rollmill.rollout.manager import RolloutManager, RolloutParts
from rollmill.rollout.round import RoundParts
from rollmill.rollout.stream import Stream
from rollmill.sample import Group
from rollmill.sample_codec import encode_group
from rollmill.telemetry.progress import ProgressListener, ignore_progress


class StreamingManager(RolloutManager):
    """A `RolloutManager` whose answers are written ahead of the step that trains on them.

    `weights_changed` must be called after every weight sync; `close` ends the stream. A checkpoint
    holds the finished groups, and the prompts of those in flight, which a resume asks afresh.

    Args:
        config: the `rollout` section.
        parts: source, ledger, runner, filters and hooks.
        listener: told about progress, for live views.
        last_step: of the run; nothing is written that no batch up to it needs.
    """

    def __init__(
        self,
        config: RolloutConfig,
        parts: RolloutParts,
        listener: ProgressListener = ignore_progress,
        *,
        last_step: int | None = None,
    ) -> None:
        super().__init__(config, parts, listener)
        self._last_step = last_step
        self._stream: Stream | None = None

    async def collect(self, *, step: int, version: int) -> RolloutBatch:
        """The next batch; no group in it is more than `max_staleness` versions old.

        Raises:
            RolloutError: too many groups failed, or a filter rejects everything.
            HookError: a function of the user's broke its contract.
        """
        stream = self._started(step, version)
        taken: list[Group] = []
        try:
            taken = await stream.next_batch()
            metrics = stream.metrics()
            batch = self._finish(stream.collector, Books(self._parts.ledger, step), version)
        except BaseException:
            await self.close()
            self._ready += taken  # no batch has them: they are finished work like the rest
            raise
        stream.begin_step(step + 1)
        batch.metrics = metrics | batch.metrics
        self._parts.ledger.flush()
        return batch

    def weights_changed(self, version: int) -> None:
        """Engines serve weights of `version` now: groups of the next batches may be admitted."""
        if self._stream is not None:
            self._stream.weights_changed(version)

    async def close(self) -> None:
        """End what is in flight; its prompts go back to the source."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            try:
                await stream.stop()
            finally:
                self._ready = stream.leftover()
                self._parts.ledger.flush()

    def state_dict(self) -> dict[str, object]:
        """Finished groups, prompts in flight and the source's position, as msgpack values."""
        finished = [*self._ready, *(self._stream.finished_groups() if self._stream else ())]
        in_flight = self._stream.prompts_in_flight() if self._stream else []
        return {
            **super().state_dict(),
            "ready": [encode_group(group) for group in finished],
            "in_flight": [encode_group(group) for group in in_flight],
        }

    def _started(self, step: int, version: int) -> Stream:
        if self._stream is None:
            context = self._parts.runner.context
            context.gate.open()
            context.usage.begin()
            self._stream = Stream(
                self._parts_at, step=step, version=version, last_step=self._last_step
            )
            self._ready = []
        return self._stream

    def _parts_at(self, step: int, version: int) -> RoundParts:
        return self._round_parts(step, version, Books(self._parts.ledger, step))
