"""Putting a run together: from a configuration to running engines, judge, trainer and books.

Everything that can be wrong with the configuration, the data, the model or the user's functions is
found in `ready`, before anything is started; then all that takes long starts at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.cluster.ranks import Worker
from rollmill.config import Config
from rollmill.config.load import to_plain
from rollmill.distill.recorded import RecordedSource
from rollmill.engine.pool import EnginePool
from rollmill.errors import first_error
from rollmill.loop.activities import Activities
from rollmill.loop.distill import check_recorded_scores, mismatch_metrics
from rollmill.loop.doctor import StallDoctor
from rollmill.loop.evaluations import EnginesApart, Evaluations
from rollmill.loop.faults import FaultInjector
from rollmill.loop.policy import start_trainer
from rollmill.loop.ready import Ready, read_and_check
from rollmill.loop.records import Records, open_timeline
from rollmill.loop.run_dir import RunDir
from rollmill.loop.state import Checkpoints
from rollmill.loop.sync import WeightSync
from rollmill.loop.teachers import live_teachers
from rollmill.loop.training_rollouts import open_rollouts
from rollmill.rollout.batch import Rollouts
from rollmill.telemetry.console import RunView
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.trackers import open_trackers
from rollmill.trainer.checkpoint import CheckpointStore
from rollmill.weights import open_transport
from rollmill.weights.disk import DiskTransport


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, started (the engines only where the run needs them)."""

    config: Config
    run_dir: RunDir
    engines: EnginePool
    rollouts: Rollouts
    evaluations: Evaluations
    trainer: Worker
    sync: WeightSync
    checkpoints: Checkpoints
    records: Records
    view: RunView
    doctor: StallDoctor
    faults: FaultInjector
    tokenizer: Any
    constant_metrics: dict[str, float]


@asynccontextmanager
async def open_parts(config: Config, *, base_dir: Path, view: RunView) -> AsyncIterator[Parts]:
    """Start everything a training run needs; stop it all on the way out, whatever happened.

    Args:
        config: the whole configuration.
        base_dir: folder of the configuration file.
        view: the terminal view.

    Raises:
        RollmillError: something cannot be used as configured.
    """
    view.phase("reading model and data")
    ready = read_and_check(config, base_dir)
    if not ready.run_dir.is_started:
        ready.run_dir.write_down(config, ready.policy.tokenizer)
    async with AsyncExitStack() as stack:
        trackers = stack.enter_context(
            open_trackers(config.telemetry, ready.run_dir.root, to_plain(config))
        )
        timeline = open_timeline(config.telemetry, ready.run_dir.root)
        view.phase("starting trainer, engines and rewards")
        trainer = await _start_processes(stack, config, ready, base_dir)
        if isinstance(ready.source, RecordedSource):
            await check_recorded_scores(trainer, ready.source, config)
        transport = open_transport(config, ready.run_dir.root)
        stack.push_async_callback(transport.close)
        teachers, allowed = await live_teachers(
            stack,
            config,
            ready.policy,
            ready.run_dir.root,
            activities=ready.activities,
            timeline=timeline,
        )
        rollouts = open_rollouts(stack, config, ready, timeline, view, base_dir, teachers)
        records = Records(
            MetricsLog(ready.run_dir.metrics),
            trackers,
            timeline,
            Dumps(config.telemetry, ready.run_dir.root),
        )
        doctor = _open_doctor(config, ready.activities, ready.pool)
        ready.faults.attach(lambda: ready.pool.pids, lambda: trainer.pid)
        yield Parts(
            config=config,
            run_dir=ready.run_dir,
            engines=ready.pool,
            rollouts=rollouts,
            evaluations=_open_evaluations(stack, config, ready, records, view, doctor),
            trainer=trainer,
            sync=WeightSync(config, trainer=trainer, engines=ready.pool, transport=transport),
            checkpoints=_open_checkpoints(config, ready, trainer, rollouts, records, view),
            records=records,
            view=view,
            doctor=doctor,
            faults=ready.faults,
            tokenizer=ready.policy.tokenizer,
            constant_metrics=mismatch_metrics(config, ready.source, allowed),
        )


async def _start_processes(
    stack: AsyncExitStack, config: Config, ready: Ready, base_dir: Path
) -> Worker:
    """Engines, reward workers and the trainer, all at once; the trainer.

    Recorded answers need no judge, and no engines unless something is evaluated.
    """
    async with _all_or_first_error() as starting:
        if not config.rollout.is_replay:
            starting.create_task(stack.enter_async_context(ready.judge))
        starting.create_task(stack.enter_async_context(ready.evaluator))
        if config.needs_engines:
            starting.create_task(stack.enter_async_context(ready.pool))
        if ready.pool_apart is not None:
            starting.create_task(stack.enter_async_context(ready.pool_apart))
        trainer = starting.create_task(
            start_trainer(stack, config, ready.policy, ready.run_dir, base_dir)
        )
    return trainer.result()


def _open_checkpoints(
    config: Config,
    ready: Ready,
    trainer: Worker,
    rollouts: Rollouts,
    records: Records,
    view: RunView,
) -> Checkpoints:
    return Checkpoints(
        CheckpointStore(ready.run_dir.checkpoints, config.run.keep_checkpoints),
        trainer=trainer,
        rollouts=rollouts,
        records=records,
        view=view,
        faults=ready.faults,
    )


def _open_evaluations(
    stack: AsyncExitStack,
    config: Config,
    ready: Ready,
    records: Records,
    view: RunView,
    doctor: StallDoctor,
) -> Evaluations:
    apart = None
    if ready.pool_apart is not None:
        doctor = _open_doctor(config, ready.eval_activities, ready.pool_apart)
        place = ready.run_dir.root / "evaluation"  # names a folder apart from training's
        transport = DiskTransport(config.weights, place, dtype=config.engine.embedded.dtype)
        stack.push_async_callback(transport.close)
        apart = EnginesApart(ready.pool_apart, transport)
    evaluations = Evaluations(
        config,
        evaluator=ready.evaluator,
        records=records,
        view=view,
        doctor=doctor,
        apart=apart,
    )
    stack.push_async_callback(evaluations.close)
    return evaluations


def _open_doctor(config: Config, activities: Activities, engines: EnginePool) -> StallDoctor:
    return StallDoctor(
        timeout_s=config.run.stall_timeout_s,
        policy=config.run.on_stall,
        abort_timeout_s=config.rollout.abort_timeout_s,
        activities=activities,
        engines=engines,
    )


@asynccontextmanager
async def _all_or_first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error comes out by itself, not wrapped in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_error(group) from None
