"""What a run needs, read and found usable; nothing of it runs yet."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.config import Config
from rollmill.data import PromptRow, open_source
from rollmill.data.source import DataSource
from rollmill.engine.pool import EnginePool
from rollmill.errors import ConfigError, ModelError
from rollmill.filters import DynamicFilter, load_ranking
from rollmill.filters.over_sampling import Ranking
from rollmill.loop.activities import Activities
from rollmill.loop.distill import open_recorded_source
from rollmill.loop.fault_plan import plan_faults
from rollmill.loop.faults import FaultInjector
from rollmill.loop.policy import Policy, open_evaluator, open_policy, open_pools
from rollmill.loop.run_dir import RunDir
from rollmill.loop.teachers import check_teacher_names
from rollmill.loop.watched import WatchedEngines
from rollmill.models import resolve_model
from rollmill.rewards.judge import Judge
from rollmill.rewards.registry import check_names, reward_names
from rollmill.rollout.evaluate import Evaluator
from rollmill.rollout.hooks import LoadedHooks, SourceContext, load_hooks, make_source
from rollmill.trainer.algorithm import find_algorithm


@dataclass(frozen=True)
class Ready:
    """What was read and found usable; nothing of it runs yet."""

    run_dir: RunDir
    policy: Policy
    hooks: LoadedHooks
    source: DataSource
    pool: EnginePool
    pool_apart: EnginePool | None
    activities: Activities
    eval_activities: Activities
    faults: FaultInjector
    evaluator: Evaluator
    judge: Judge
    dynamic_filter: DynamicFilter
    ranking: Ranking | None


def read_and_check(config: Config, base_dir: Path) -> Ready:
    """Everything that can be wrong before a process is started, cheap checks first.

    Raises:
        RollmillError: something cannot be used as configured.
    """
    run_dir = RunDir(config.run.dir)
    check_fresh(config, run_dir)
    check_names(config.reward)
    check_other_models(config)
    check_router(config)
    find_algorithm(config.trainer.algorithm, base_dir=base_dir, opd=config.opd)
    policy = open_policy(config)
    hooks = load_hooks(config.rollout.hooks, base_dir)
    faults = open_faults(config, run_dir)
    pool, apart = open_pools(config, policy, run_dir, middlewares=(faults.middleware,))
    activities = Activities()
    eval_activities = Activities() if apart is not None else activities
    eval_engines = WatchedEngines(apart or pool, eval_activities)
    filters, key = config.rollout.filters, config.reward.reward_key
    return Ready(
        run_dir=run_dir,
        policy=policy,
        hooks=hooks,
        source=open_prompts(config, policy, hooks, base_dir),
        pool=pool,
        pool_apart=apart,
        activities=activities,
        eval_activities=eval_activities,
        faults=faults,
        evaluator=open_evaluator(config, policy, eval_engines, hooks, base_dir),
        judge=Judge(config.reward, seed=config.run.seed, base_dir=base_dir),
        dynamic_filter=DynamicFilter(filters, reward_key=key, base_dir=base_dir),
        ranking=load_ranking(filters.over_sampling, reward_key=key, base_dir=base_dir),
    )


def check_other_models(config: Config) -> None:
    """Raise ModelError when the reference model or the critic's start cannot be used."""
    named = {
        "trainer.reference_model": config.trainer.reference_model,
        "trainer.critic.model": config.trainer.critic.model,
    }
    for field, path in named.items():
        if path is None:
            continue
        try:
            resolve_model(path, needs_tokenizer=False)
        except ModelError as error:
            raise ModelError(error.what, **dict(error.parts()) | {"where": field}) from error


def check_router(config: Config) -> None:
    """Raise ConfigError when the router that is asked for is not installed."""
    if config.engine.router == "sglang" and importlib.util.find_spec("sglang_router") is None:
        raise ConfigError(
            "the SGLang router is not installed",
            where="engine.router",
            expected="the package sglang-router in this environment",
            found="none",
            fix='pip install "rollmill[router]", or set engine.router: none',
        )


def check_fresh(config: Config, run_dir: RunDir) -> None:
    """Raise ConfigError when a run that must not be gone on with has checkpoints."""
    if run_dir.is_started and not config.run.resume:
        raise ConfigError(
            "the run folder holds checkpoints, and run.resume is false",
            where=str(run_dir.root),
            expected="an empty run folder",
            fix="choose another run.dir, or set run.resume to true to go on",
        )


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
    source = open_source(
        context.config,
        tokenizer=context.tokenizer,
        n_samples_per_prompt=context.n_samples_per_prompt,
        seed=context.seed,
        context_length=context.context_length,
        base_dir=context.base_dir,
        buffer_policy=context.buffer_policy,
    )
    check_judged(config, source.dataset.rows)
    if config.opd.mode == "live":
        check_teacher_names(config, source.dataset.rows)
    return source


def check_judged(config: Config, rows: Sequence[PromptRow]) -> None:
    """Raise ConfigError when nothing says how a row's answers are judged.

    A function that generates may set the reward itself, a teacher needs none, and recorded answers
    are not judged.
    """
    hooks = config.rollout.hooks
    may_set_reward = hooks.generate or hooks.sample or hooks.rollout
    if reward_names(config.reward) or may_set_reward:
        return
    if config.opd.is_on or config.rollout.is_replay:
        return
    for row in rows:
        if row.metadata.get("reward_type") is None:
            raise ConfigError(
                "nothing says how answers are judged",
                where="reward",
                expected="a type, a function or weights, or metadata.reward_type in every row",
                found=f"none of them for {row.row_id}",
                fix="add `reward: {type: math}` (or another type), or "
                "`reward: {function: my_reward.py:reward}`",
            )


def open_faults(config: Config, run_dir: RunDir) -> FaultInjector:
    """The faults that the configuration asks for; usually none."""
    plan = plan_faults(
        config.faults,
        num_steps=config.run.num_steps,
        requests_per_step=config.attempts_per_batch,
    )
    return FaultInjector(plan, run_dir.root / "faults.jsonl", pause_s=config.faults.pause_s)
