"""Saving and resuming: the trainer's state, the rollouts' state and the position of the books."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from rollmill.cluster.ranks import Worker
from rollmill.errors import CheckpointError, LedgerError
from rollmill.loop.faults import FaultInjector
from rollmill.loop.records import Records
from rollmill.rollout.batch import Rollouts
from rollmill.telemetry.console import RunView
from rollmill.trainer.checkpoint import CheckpointStore

logger = logging.getLogger(__name__)
ROLLOUT_STATE = "rollout.msgpack"
TRAINER_STATE = "trainer"


class Checkpoints:
    """The checkpoints of a run.

    Args:
        store: where they lie.
        trainer: its state is one part.
        rollouts: theirs is the other.
        records: what was written of steps that are done again goes.
        view: the terminal view.
        faults: the disk may be full on purpose.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        trainer: Worker,
        rollouts: Rollouts,
        records: Records,
        view: RunView,
        faults: FaultInjector,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._rollouts = rollouts
        self._records = records
        self._view = view
        self._faults = faults
        self._newest = -1

    async def save(self, step: int, *, is_last: bool) -> None:
        """Write the checkpoint of `step`, unless it is there; it exists whole or not at all.

        One that cannot be written (a full disk) costs the checkpoint, not the run; but the last of
        a run must be written.

        Raises:
            CheckpointError: the last one could not be written.
        """
        if step == self._newest:
            return
        started = time.monotonic()
        try:
            await self._write(step)
        except CheckpointError as error:
            self._store.discard(step)
            if is_last:
                raise
            logger.warning("step %d was not saved: %s", step, error)
            self._view.message(f"step {step} was not saved: {error.what}")
        else:
            self._newest = step
            seconds = time.monotonic() - started
            logger.info("saved the checkpoint of step %d in %.1f s", step, seconds)

    async def resume(self) -> int:
        """Go on from the newest whole checkpoint; the number of steps done (0 without one).

        Raises:
            CheckpointError: there are checkpoints and none can be used.
        """
        checkpoint = await asyncio.to_thread(self._store.latest)
        if checkpoint is None:
            self._rollouts.forget_everything()
            self._records.forget_after(-1)
            return 0
        await self._trainer.call("load", path=str(checkpoint.path / TRAINER_STATE))
        packed = (checkpoint.path / ROLLOUT_STATE).read_bytes()
        state: dict[str, Any] = msgspec.msgpack.decode(packed)
        self._rollouts.load_state_dict(state)
        self._records.forget_after(checkpoint.step)
        self._newest = checkpoint.step
        return checkpoint.step

    async def _write(self, step: int) -> None:
        try:
            folder = self._store.begin(step)
            (folder / TRAINER_STATE).mkdir()
            with self._faults.saving():
                await self._trainer.call("save", path=str(folder / TRAINER_STATE))
            packed = msgspec.msgpack.encode(self._rollouts.state_dict())
            (folder / ROLLOUT_STATE).write_bytes(packed)
            await asyncio.to_thread(self._store.commit, step, {"weight_version": step})
        except (OSError, LedgerError) as error:
            raise CheckpointError(
                "the checkpoint cannot be written",
                where=f"step {step}",
                found=str(error),
                fix="make room on the disk, or lower run.keep_checkpoints",
            ) from error
