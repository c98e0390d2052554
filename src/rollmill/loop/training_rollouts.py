"""The rollout side of a training run: batches generated in turns, ahead of it, or replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from rollmill.config import Config
from rollmill.data.ledger import Ledger
from rollmill.loop.policy import Policy
from rollmill.loop.ready import Ready
from rollmill.loop.teachers import is_without_reward, training_length
from rollmill.loop.traced import TracedEngines, TracedGrader
from rollmill.loop.watched import WatchedEngines, WatchedGrader, watched
from rollmill.rollout.batch import Rollouts
from rollmill.rollout.gate import Gate
from rollmill.rollout.generate import Engines, GenerateContext
from rollmill.rollout.group import Grader, GroupRunner
from rollmill.rollout.hooks import LoadedHooks, generate_overrides
from rollmill.rollout.manager import RolloutManager, RolloutParts
from rollmill.rollout.replay import ReplayManager, ReplayParts
from rollmill.rollout.streaming import StreamingManager
from rollmill.rollout.teacher import Teachers, ZeroReward
from rollmill.telemetry.console import RunView
from rollmill.telemetry.timeline import Timeline


def open_rollouts(
    stack: AsyncExitStack,
    config: Config,
    ready: Ready,
    timeline: Timeline,
    view: RunView,
    base_dir: Path,
    teachers: Teachers | None,
) -> Rollouts:
    """Where the loop gets its batches; closed with `stack`."""
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


def _open_replay(config: Config, ready: Ready, ledger: Ledger, view: RunView) -> Rollouts:
    parts = ReplayParts(
        source=ready.source,
        ledger=ledger,
        dynamic_filter=ready.dynamic_filter,
        hooks=ready.hooks,
        reward_key=config.reward.reward_key,
    )
    return ReplayManager(config.rollout, parts, view.progress)
