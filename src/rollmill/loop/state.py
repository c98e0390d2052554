"""Saving and resuming: the trainer's state, the rollouts' state and the position of the books."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from rollmill.cluster.ranks import Worker
from rollmill.errors import CheckpointError
from rollmill.loop.records import Records
from rollmill.rollout.batch import Rollouts
from rollmill.trainer.checkpoint import CheckpointStore

logger = logging.getLogger(__name__)
ROLLOUT_STATE = "rollout.msgpack"
TRAINER_STATE = "trainer"


async def save(store: CheckpointStore, step: int, *, trainer: Worker, rollouts: Rollouts) -> None:
    """Write the checkpoint of `step`; it exists whole or not at all.

    Raises:
        CheckpointError: it could not be written (the disk is full, perhaps); nothing is left of it.
    """
    try:
        folder = store.begin(step)
        (folder / TRAINER_STATE).mkdir()
        await trainer.call("save", path=str(folder / TRAINER_STATE))
        (folder / ROLLOUT_STATE).write_bytes(msgspec.msgpack.encode(rollouts.state_dict()))
        await asyncio.to_thread(store.commit, step, {"weight_version": step})
    except OSError as error:
        store.discard(step)
        raise CheckpointError(
            "the checkpoint cannot be written", where=f"step {step}", found=str(error)
        ) from error
    except CheckpointError:
        store.discard(step)
        raise
    logger.info("saved the checkpoint of step %d", step)


async def resume(
    store: CheckpointStore,
    *,
    trainer: Worker,
    rollouts: Rollouts,
    records: Records,
) -> int:
    """Go on from the newest whole checkpoint; the number of steps done (0 without one).

    Raises:
        CheckpointError: there are checkpoints and none can be used.
    """
    checkpoint = await asyncio.to_thread(store.latest)
    if checkpoint is None:
        rollouts.forget_everything()
        records.forget_after(-1)
        return 0
    await trainer.call("load", path=str(checkpoint.path / TRAINER_STATE))
    state: dict[str, Any] = msgspec.msgpack.decode((checkpoint.path / ROLLOUT_STATE).read_bytes())
    rollouts.load_state_dict(state)
    records.forget_after(checkpoint.step)
    return checkpoint.step
