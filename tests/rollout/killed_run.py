"""A training run to be killed: the real loop, ledger, checkpoints and worker process.

`python killed_run.py RUN_DIR ENGINE_URL VARIANT` goes on from the newest checkpoint in RUN_DIR. The
engine is a scripted one, the trainer a stub; rewards are set while generating.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from rollout_helpers import make_side

from rollmill.cluster.local import LocalWorker
from rollmill.config import Config
from rollmill.engine.pool import EnginePool
from rollmill.loop.activities import Activities
from rollmill.loop.doctor import StallDoctor
from rollmill.loop.evaluations import Evaluations
from rollmill.loop.parts import Parts
from rollmill.loop.ready import open_faults
from rollmill.loop.records import Records, open_timeline
from rollmill.loop.run_dir import RunDir, RunLock
from rollmill.loop.state import Checkpoints
from rollmill.loop.sync import WeightSync
from rollmill.loop.train import Loop
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.hooks import LoadedHooks
from rollmill.sample import Sample
from rollmill.telemetry.console import RunView
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.trackers import open_trackers
from rollmill.trainer.checkpoint import CheckpointStore
from rollmill.weights.disk import DiskTransport

NUM_STEPS = 8
VARIANTS: dict[str, dict[str, Any]] = {
    # One request at a time: the order of events is fixed, though groups are over-sampled, left
    # unfinished, gone on with, rejected and failed.
    "serial": {
        "rollout": {
            "batch_size": 4,
            "over_sampling_batch_size": 7,
            "partial_rollout": True,
            "max_staleness": 4,
            "max_attempt_retries": 0,
            "filters": {"dynamic": "nonzero_std"},
        },
        "max_requests": 1,
    },
    # Many at a time, with faults that a retry mends.
    "concurrent": {"rollout": {"batch_size": 4, "max_attempt_retries": 6}, "max_requests": 32},
}


class Wordless:
    """A tokenizer to write down: nobody reads this run's text."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)


async def generate(sample: Sample, context: GenerateContext) -> Sample:
    """Rewards that differ within a group, except in every fifth row; row 9 cannot be answered."""
    row = sample.metadata["row"]
    if context.gate._limit == 1 and row == 9:
        raise ValueError("row 9 is broken")
    await context.extend(sample)
    if sample.status.is_finished:
        is_flat = context.gate._limit == 1 and row % 5 == 2
        sample.reward = 0.0 if is_flat else float(sample.attempt)
    return sample


async def main(root: Path, url: str, variant: str) -> None:
    settings = VARIANTS[variant]
    config = Config.model_validate(
        {
            "run": {"dir": str(root), "num_steps": NUM_STEPS, "save_every": 2},
            "model": {"path": "none"},
            "data": {"path": "none.jsonl"},
            "rollout": settings["rollout"] | {"n_samples_per_prompt": 2},
            "engine": {"urls": [url], "health_interval_s": 60.0},
            "telemetry": {"console": False},
        }
    )
    run_dir = RunDir(root)
    with RunLock(root):
        pool = EnginePool(config.engine, model_path="none", run_dir=root)
        trainer = LocalWorker(
            "stub_trainer:StubTrainer",
            name="trainer",
            log_path=run_dir.logs / "trainer.log",
            environment={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        side = make_side(
            root,
            pool,
            config=config.rollout.model_dump(exclude={"sampling"}),
            hooks=LoadedHooks(generate=generate),
            max_requests=settings["max_requests"],
        )
        transport = DiskTransport(config.weights, root, dtype="float32")
        records = Records(
            MetricsLog(run_dir.metrics),
            open_trackers(config.telemetry, root),
            open_timeline(config.telemetry, root),
            Dumps(config.telemetry, root),
        )
        doctor = StallDoctor(
            timeout_s=None,
            policy="warn",
            abort_timeout_s=1.0,
            activities=Activities(),
            engines=pool,
        )
        view = RunView(is_on=False, num_steps=NUM_STEPS)
        faults = open_faults(config, run_dir)
        nobody: Any = None  # there is nothing to evaluate
        parts = Parts(
            config=config,
            run_dir=run_dir,
            engines=pool,
            rollouts=side.manager,
            evaluations=Evaluations(
                config, evaluator=nobody, records=records, view=view, doctor=doctor, apart=None
            ),
            trainer=trainer,
            sync=WeightSync(config, trainer=trainer, engines=pool, transport=transport),
            checkpoints=Checkpoints(
                CheckpointStore(run_dir.checkpoints, 2),
                trainer=trainer,
                rollouts=side.manager,
                records=records,
                view=view,
                faults=faults,
            ),
            records=records,
            view=view,
            doctor=doctor,
            faults=faults,
            constant_metrics={},
            tokenizer=Wordless(),
        )
        try:
            await trainer.start()
            async with pool:
                await Loop(parts, asyncio.Event()).run()
        finally:
            side.ledger.close()
            await transport.close()
            await trainer.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
