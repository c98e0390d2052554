"""`rollmill export`: a checkpoint becomes a Hugging Face model folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollmill.cluster.local import LocalWorker
from rollmill.config.load import load_config
from rollmill.config.trainer import AlgorithmConfig
from rollmill.errors import CheckpointError
from rollmill.loop.run_dir import RunDir
from rollmill.loop.state import TRAINER_STATE
from rollmill.models import resolve_model
from rollmill.trainer.checkpoint import newest_checkpoint


def export_run(run: Path, out: Path, *, dtype: str) -> Path:
    """Write the newest whole checkpoint of `run` to `out`.

    Raises:
        CheckpointError: there is none, or `out` holds something already.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(
            "the folder to export to is not empty", where=str(out), fix="name a new folder"
        )
    run_dir = RunDir(run)
    if not run_dir.config.is_file():
        raise CheckpointError(
            "this is no run folder",
            where=str(run),
            expected="a folder with config.yaml",
            fix="give the run.dir of a training run",
        )
    config = load_config(run_dir.config)
    checkpoint = newest_checkpoint(run_dir.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            "the run has no checkpoint yet",
            where=str(run_dir.checkpoints),
            fix="wait for its first one (run.save_every), or let the run end",
        )

    # nothing is trained: the run's own functions need not be there, nor a critic or reference
    settings = config.trainer.model_copy(update={"algorithm": AlgorithmConfig()})

    async def work() -> None:
        trainer = LocalWorker(
            "rollmill.trainer.worker:TorchTrainer",
            name="trainer",
            log_path=run_dir.logs / "export.log",
        )
        try:
            await trainer.start(
                config=settings.model_dump(mode="json"),
                model_path=str(resolve_model(config.model.path)),
                seed=config.run.seed,
                num_total_steps=config.run.num_steps,
                context_length=config.model.context_length or 0,
            )
            await trainer.call("load", path=str(checkpoint.path / TRAINER_STATE))
            await trainer.call("export", path=str(out), dtype=dtype)
        finally:
            await trainer.stop()

    asyncio.run(work())
    return out
