"""Putting a run together: from a configuration to running engines, judge, trainer and books.

Everything that can be wrong with the configuration, the data, the model or the user's functions is
found here, before the first rollout; cheap checks come before anything that takes long to start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.cluster.local import LocalWorker
from rollmill.cluster.ranks import RankGroup, Worker
from rollmill.config import Config
from rollmill.config.load import to_plain
from rollmill.data import load_tokenizer, open_source
from rollmill.data.ledger import Ledger
from rollmill.data.source import DataSource
from rollmill.engine.pool import EnginePool
from rollmill.errors import ConfigError, first_error
from rollmill.filters import DynamicFilter, load_ranking
from rollmill.loop.records import Records, open_timeline
from rollmill.loop.run_dir import RunDir
from rollmill.loop.traced import TracedEngines, TracedGrader
from rollmill.models import context_length_of, resolve_model
from rollmill.rewards.judge import Judge
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
from rollmill.rollout.streaming import StreamingManager
from rollmill.telemetry.console import RunView
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.trackers import open_trackers
from rollmill.trainer.checkpoint import CheckpointStore
from rollmill.weights.disk import DiskTransport

logger = logging.getLogger(__name__)

TRAINER = "rollmill.trainer.worker:TorchTrainer"
"""What runs in a trainer's process."""


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, started."""

    config: Config
    run_dir: RunDir
    engines: EnginePool
    rollouts: RolloutManager
    evaluator: Evaluator
    trainer: Worker
    transport: DiskTransport
    checkpoints: CheckpointStore
    records: Records
    view: RunView


@dataclass(frozen=True)
class Policy:
    """The model's files and limits."""

    folder: Path
    tokenizer: Any
    context_length: int


def open_policy(config: Config) -> Policy:
    """Find the model and its tokenizer.

    Raises:
        ModelError: they are missing or unusable.
        ConfigError: the context length is more than the model has.
    """
    folder = resolve_model(config.model.path, needs_tokenizer=config.model.tokenizer is None)
    tokenizer = load_tokenizer(
        config.model.tokenizer or folder, trust_remote_code=config.model.trust_remote_code
    )
    limit = context_length_of(folder)
    wanted = config.model.context_length
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(
            "the context length is more than the model's own",
            where="model.context_length",
            expected=f"at most {limit}",
            found=str(wanted),
            fix="lower it, or set it to null to take the model's own",
        )
    length = wanted or limit
    if length is None:
        raise ConfigError(
            "the model does not say how long its context is",
            where="model.context_length",
            expected="a number of tokens",
            found="null",
        )
    return Policy(folder, tokenizer, length)


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
    run_dir = RunDir(config.run.dir)
    check_fresh(config, run_dir)
    view.phase("reading model and data")
    policy = open_policy(config)
    hooks = load_hooks(config.rollout.hooks, base_dir)
    source = open_prompts(config, policy, hooks, base_dir)
    pool = EnginePool(
        config.engine,
        model_path=str(policy.folder),
        tokenizer_path=config.model.tokenizer,
        context_length=policy.context_length,
        run_dir=run_dir.root,
    )
    evaluator = Evaluator(
        config,
        engines=pool,
        tokenizer=policy.tokenizer,
        context_length=policy.context_length,
        hooks=hooks,
        base_dir=base_dir,
    )
    timeline = open_timeline(config.telemetry, run_dir.root)
    judge = Judge(config.reward, seed=config.run.seed, base_dir=base_dir)
    dynamic = DynamicFilter(
        config.rollout.filters, reward_key=config.reward.reward_key, base_dir=base_dir
    )
    ranking = load_ranking(
        config.rollout.filters.over_sampling,
        reward_key=config.reward.reward_key,
        base_dir=base_dir,
    )
    run_dir.write_config(config)
    async with AsyncExitStack() as stack:
        trackers = stack.enter_context(
            open_trackers(config.telemetry, run_dir.root, to_plain(config))
        )
        ledger = Ledger(run_dir.ledger)
        stack.callback(ledger.close)
        view.phase("starting trainer, engines and rewards")
        async with _all_or_first_error() as starting:
            starting.create_task(stack.enter_async_context(judge))
            starting.create_task(stack.enter_async_context(evaluator))
            starting.create_task(stack.enter_async_context(pool))
            trainer_started = starting.create_task(
                start_trainer(stack, config, policy, run_dir, base_dir)
            )
        trainer = trainer_started.result()
        transport = DiskTransport(config.weights, run_dir.root, dtype=config.engine.embedded.dtype)
        stack.push_async_callback(transport.close)
        runner = make_runner(
            config,
            policy,
            pool=TracedEngines(pool, timeline),
            judge=TracedGrader(judge, timeline),
            hooks=hooks,
            new_index=source.new_index,
            base_dir=base_dir,
        )
        parts = RolloutParts(
            source=source,
            ledger=ledger,
            runner=runner,
            dynamic_filter=dynamic,
            ranking=ranking,
            hooks=hooks,
            reward_key=config.reward.reward_key,
        )
        manager = StreamingManager if config.rollout.asynchronous else RolloutManager
        rollouts = manager(config.rollout, parts, view.progress)
        stack.push_async_callback(rollouts.close)
        yield Parts(
            config=config,
            run_dir=run_dir,
            engines=pool,
            rollouts=rollouts,
            evaluator=evaluator,
            trainer=trainer,
            transport=transport,
            checkpoints=CheckpointStore(run_dir.checkpoints, config.run.keep_checkpoints),
            records=Records(MetricsLog(run_dir.metrics), trackers, timeline),
            view=view,
        )


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
    """The source of training prompts: the user's own, or the one that `data` describes."""
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
        context_length=policy.context_length,
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


async def start_trainer(
    stack: AsyncExitStack, config: Config, policy: Policy, run_dir: RunDir, base_dir: Path
) -> Worker:
    """The trainer's process, or all of its ranks, stopped when `stack` closes."""
    place: dict[str, Any] = {
        "name": "trainer",
        "log_path": run_dir.logs / "trainer.log",
        "environment": {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
    }
    num_ranks = config.trainer.num_ranks
    trainer: Worker
    if num_ranks == 1:
        trainer = LocalWorker(TRAINER, **place)
    else:
        trainer = RankGroup(TRAINER, num_ranks=num_ranks, **place)
    stack.push_async_callback(trainer.stop)
    await trainer.start(
        config=config.trainer.model_dump(mode="json"),
        model_path=str(policy.folder),
        seed=config.run.seed,
        num_total_steps=config.run.num_steps,
        context_length=policy.context_length,
        base_dir=str(base_dir),
    )
    return trainer
