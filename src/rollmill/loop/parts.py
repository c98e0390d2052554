"""Putting a run together: from a configuration to running engines, judge, trainer and books.

Everything that can be wrong with the configuration, the data, the model or the user's functions is
found here, before the first rollout; cheap checks come before anything that takes long to start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rollmill.cluster.ranks import Worker
from rollmill.config import Config
from rollmill.config.load import to_plain
from rollmill.data import open_source
from rollmill.data.ledger import Ledger
from rollmill.data.source import DataSource
from rollmill.distill.recorded import RecordedSource
from rollmill.engine.pool import EnginePool
from rollmill.errors import ConfigError, first_error
from rollmill.filters import DynamicFilter, load_ranking
from rollmill.filters.over_sampling import Ranking
from rollmill.loop.activities import Activities
from rollmill.loop.distill import check_recorded_scores, mismatch_metrics, open_recorded_source
from rollmill.loop.doctor import StallDoctor
from rollmill.loop.evaluations import EnginesApart, Evaluations
from rollmill.loop.fault_plan import plan_faults
from rollmill.loop.faults import FaultInjector
from rollmill.loop.policy import (
    Policy,
    open_evaluator,
    open_policy,
    open_pools,
    start_trainer,
)
from rollmill.loop.records import Records, open_timeline
from rollmill.loop.run_dir import RunDir
from rollmill.loop.sync import WeightSync
from rollmill.loop.teachers import is_without_reward, live_teachers, training_length
from rollmill.loop.traced import TracedEngines, TracedGrader
from rollmill.loop.watched import WatchedEngines, WatchedGrader, watched
from rollmill.rewards.judge import Judge
from rollmill.rollout.batch import Rollouts
from rollmill.rollout.evaluate import Evaluator
from rollmill.rollout.gate import Gate
from rollmill.rollout.generate import Engines, GenerateContext
from rollmill.rollout.group import Grader, GroupRunner
from rollmill.rollout.hooks import (
    LoadedHooks,
    SourceContext,
    generate_overrides,
    load_hooks,
    make_source,
)
from rollmill.rollout.manager import RolloutManager, RolloutParts
from rollmill.rollout.replay import ReplayManager, ReplayParts
from rollmill.rollout.streaming import StreamingManager
from rollmill.rollout.teacher import Teachers, ZeroReward
from rollmill.telemetry.console import RunView
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.timeline import Timeline
from rollmill.telemetry.trackers import open_trackers
from rollmill.trainer.checkpoint import CheckpointStore
from rollmill.weights import open_transport
from rollmill.weights.disk import DiskTransport

logger = logging.getLogger(__name__)


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
    checkpoints: CheckpointStore
    records: Records
    view: RunView
    doctor: StallDoctor
    faults: FaultInjector
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
    ready = _read_and_check(config, base_dir)
    ready.run_dir.write_config(config)
    ready.run_dir.write_tokenizer(ready.policy.tokenizer)
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
        teachers = await live_teachers(
            stack,
            config,
            ready.policy,
            ready.run_dir.root,
            activities=ready.activities,
            timeline=timeline,
        )
        rollouts = _open_rollouts(stack, config, ready, timeline, view, base_dir, teachers)
        records = Records(
            MetricsLog(ready.run_dir.metrics),
            trackers,
            timeline,
            Dumps(config.telemetry, ready.run_dir.root),
        )
        doctor = StallDoctor(
            timeout_s=config.run.stall_timeout_s,
            policy=config.run.on_stall,
            abort_timeout_s=config.rollout.abort_timeout_s,
            activities=ready.activities,
            engines=ready.pool,
        )
        ready.faults.attach(lambda: ready.pool.pids, lambda: trainer.pid)
        yield Parts(
            config=config,
            run_dir=ready.run_dir,
            engines=ready.pool,
            rollouts=rollouts,
            evaluations=_open_evaluations(stack, config, ready, records, view, doctor),
            trainer=trainer,
            sync=WeightSync(config, trainer=trainer, engines=ready.pool, transport=transport),
            checkpoints=CheckpointStore(ready.run_dir.checkpoints, config.run.keep_checkpoints),
            records=records,
            view=view,
            doctor=doctor,
            faults=ready.faults,
            constant_metrics=mismatch_metrics(config, ready.source),
        )


@dataclass(frozen=True)
class _Ready:
    """What was read and found usable; nothing of it runs yet."""

    run_dir: RunDir
    policy: Policy
    hooks: LoadedHooks
    source: DataSource
    pool: EnginePool
    pool_apart: EnginePool | None
    activities: Activities
    faults: FaultInjector
    evaluator: Evaluator
    judge: Judge
    dynamic_filter: DynamicFilter
    ranking: Ranking | None


def _read_and_check(config: Config, base_dir: Path) -> _Ready:
    run_dir = RunDir(config.run.dir)
    check_fresh(config, run_dir)
    policy = open_policy(config)
    hooks = load_hooks(config.rollout.hooks, base_dir)
    faults = open_faults(config, run_dir)
    pool, apart = open_pools(config, policy, run_dir, middlewares=(faults.middleware,))
    activities = Activities()
    eval_engines = WatchedEngines(apart or pool, activities)
    filters, key = config.rollout.filters, config.reward.reward_key
    return _Ready(
        run_dir=run_dir,
        policy=policy,
        hooks=hooks,
        source=open_prompts(config, policy, hooks, base_dir),
        pool=pool,
        pool_apart=apart,
        activities=activities,
        faults=faults,
        evaluator=open_evaluator(config, policy, eval_engines, hooks, base_dir),
        judge=Judge(config.reward, seed=config.run.seed, base_dir=base_dir),
        dynamic_filter=DynamicFilter(filters, reward_key=key, base_dir=base_dir),
        ranking=load_ranking(filters.over_sampling, reward_key=key, base_dir=base_dir),
    )


async def _start_processes(
    stack: AsyncExitStack, config: Config, ready: _Ready, base_dir: Path
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


def _open_rollouts(
    stack: AsyncExitStack,
    config: Config,
    ready: _Ready,
    timeline: Timeline,
    view: RunView,
    base_dir: Path,
    teachers: Teachers | None,
) -> Rollouts:
    ledger = Ledger(ready.run_dir.ledger)
    stack.callback(ledger.close)
    if config.rollout.is_replay:
        return _open_replay(config, ready, ledger, view)
    judge: Grader = ZeroReward(ready.judge) if is_without_reward(config) else ready.judge
    runner = make_runner(
        config,
        ready.policy,
        pool=TracedEngines(WatchedEngines(ready.pool, ready.activities), timeline),
        judge=TracedGrader(WatchedGrader(judge, ready.activities), timeline),
        hooks=ready.hooks,
        new_index=ready.source.new_index,
        base_dir=base_dir,
    )
    parts = RolloutParts(
        source=ready.source,
        ledger=ledger,
        runner=watched(replace(runner, teacher=teachers), ready.activities),
        dynamic_filter=ready.dynamic_filter,
        ranking=ready.ranking,
        hooks=ready.hooks,
        reward_key=config.reward.reward_key,
    )
    rollouts = (
        StreamingManager(config.rollout, parts, view.progress, last_step=config.run.num_steps)
        if config.rollout.asynchronous
        else RolloutManager(config.rollout, parts, view.progress)
    )
    stack.push_async_callback(rollouts.close)
    return rollouts


def _open_evaluations(
    stack: AsyncExitStack,
    config: Config,
    ready: _Ready,
    records: Records,
    view: RunView,
    doctor: StallDoctor,
) -> Evaluations:
    apart = None
    if ready.pool_apart is not None:
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


def open_faults(config: Config, run_dir: RunDir) -> FaultInjector:
    """The faults that the configuration asks for; usually none."""
    plan = plan_faults(
        config.faults,
        num_steps=config.run.num_steps,
        requests_per_step=config.attempts_per_batch,
    )
    return FaultInjector(plan, run_dir.root / "faults.jsonl", pause_s=config.faults.pause_s)


def _open_replay(config: Config, ready: _Ready, ledger: Ledger, view: RunView) -> Rollouts:
    parts = ReplayParts(
        source=ready.source,
        ledger=ledger,
        dynamic_filter=ready.dynamic_filter,
        hooks=ready.hooks,
        reward_key=config.reward.reward_key,
    )
    return ReplayManager(config.rollout, parts, view.progress)


def check_fresh(config: Config, run_dir: RunDir) -> None:
    """Raise ConfigError when a run that must not be gone on with has checkpoints."""
    is_started = run_dir.checkpoints.is_dir() and any(run_dir.checkpoints.glob("step_*"))
    if is_started and not config.run.resume:
        raise ConfigError(
            "the run folder holds checkpoints, and run.resume is false",
            where=str(run_dir.root),
            expected="an empty run folder",
            fix="choose another run.dir, or set run.resume to true to go on",
        )


@asynccontextmanager
async def _all_or_first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error comes out by itself, not wrapped in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def open_prompts(config: Config, policy: Policy, hooks: LoadedHooks, base_dir: Path) -> DataSource:
    """The source of training prompts: the user's own, or the one that `data` describes; for
    offline distillation, that of the recorded answers."""
    if config.opd.mode == "offline":
        return open_recorded_source(config, policy)
    context = SourceContext(
        config=config.data,
        tokenizer=policy.tokenizer,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        seed=config.run.seed,
        context_length=policy.context_length,
        base_dir=base_dir,
        buffer_policy=hooks.buffer_policy,
    )
    if hooks.data_source is not None:
        return make_source(hooks.data_source, context)
    return open_source(
        context.config,
        tokenizer=context.tokenizer,
        n_samples_per_prompt=context.n_samples_per_prompt,
        seed=context.seed,
        context_length=context.context_length,
        base_dir=context.base_dir,
        buffer_policy=context.buffer_policy,
    )


def make_runner(
    config: Config,
    policy: Policy,
    *,
    pool: Engines,
    judge: Grader,
    hooks: LoadedHooks,
    new_index: Callable[[], int],
    base_dir: Path,
) -> GroupRunner:
    """The runner of training groups."""
    context = GenerateContext(
        engines=pool,
        gate=Gate(config.engine.max_concurrent_requests),
        tokenizer=policy.tokenizer,
        sampling=config.rollout.sampling,
        context_length=training_length(config, policy),
        seed=config.run.seed if config.rollout.deterministic else None,
        step=0,
        scope="train",
        new_index=new_index,
    )
    return GroupRunner(
        generate=hooks.generate,
        overrides=generate_overrides(base_dir),
        context=context,
        judge=judge,
        reward=config.reward,
        max_retries=config.rollout.max_attempt_retries,
        sample_hook=hooks.sample,
    )
