"""Engines that serve a run's newest weights, for commands that do not train."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rollmill.config import Config
from rollmill.engine.pool import EnginePool
from rollmill.loop.policy import Policy, start_trainer
from rollmill.loop.run_dir import RunDir
from rollmill.loop.state import TRAINER_STATE
from rollmill.loop.sync import WeightSync
from rollmill.telemetry.console import RunView
from rollmill.trainer.checkpoint import newest_checkpoint
from rollmill.weights import open_transport


async def serve_newest(
    stack: AsyncExitStack,
    pool: EnginePool,
    config: Config,
    policy: Policy,
    *,
    work_dir: RunDir,
    base_dir: Path,
    view: RunView,
) -> int:
    """Bring the weights of the run's newest checkpoint to engines that run; their version.

    Without a checkpoint the engines serve the starting model: version 0. The run folder is only
    read. The trainer loads the checkpoint, and stays, without memory of its own where it shares the
    engines', for as long as engines that come back would need it.

    Args:
        stack: closes what is opened.
        pool: the engines, started.
        config: the whole configuration; `run.dir` names the run.
        policy: the model.
        work_dir: where logs and passing files go.
        base_dir: folder of the configuration file.
        view: told what is happening.

    Raises:
        CheckpointError: there are checkpoints and none can be used.
    """
    checkpoint = newest_checkpoint(RunDir(config.run.dir).checkpoints)
    if checkpoint is None:
        return 0
    view.phase(f"loading the checkpoint of step {checkpoint.step}")
    trainer = await start_trainer(stack, config, policy, work_dir, base_dir)
    await trainer.call("load", path=str(checkpoint.path / TRAINER_STATE))
    transport = open_transport(config, work_dir.root)
    stack.push_async_callback(transport.close)
    sync = WeightSync(config, trainer=trainer, engines=pool, transport=transport)
    await sync.bring(checkpoint.step)
    if not transport.needs_trainer:
        await trainer.stop()
    return checkpoint.step
