"""`rollmill rollout`: generate and judge answers without training on them.

The answers go to a folder of their own that looks like a run's, with the books and the figures, so
`rollmill view` and `rollmill inspect` show them. The run they come from is only read.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rollmill.config import Config
from rollmill.data.ledger import Ledger
from rollmill.errors import ConfigError
from rollmill.filters import DynamicFilter, load_ranking
from rollmill.loop.policy import Policy, open_policy, open_pool
from rollmill.loop.ready import open_prompts
from rollmill.loop.records import Records, open_timeline
from rollmill.loop.run_dir import RunDir, RunLock
from rollmill.loop.serving import serve_newest
from rollmill.loop.teachers import is_without_reward
from rollmill.loop.traced import TracedEngines, TracedGrader
from rollmill.loop.training_rollouts import make_runner
from rollmill.rewards.judge import Judge
from rollmill.rollout.generate import Engines
from rollmill.rollout.group import Grader
from rollmill.rollout.hooks import load_hooks
from rollmill.rollout.manager import RolloutManager, RolloutParts
from rollmill.rollout.teacher import ZeroReward
from rollmill.telemetry.console import RunView
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.trackers import Trackers


@dataclass(frozen=True)
class Collected:
    """What was generated.

    Attributes:
        version: training steps that the weights have had.
        num_groups: groups kept.
        num_dropped: groups rejected or failed.
        mean_reward: over the batches.
    """

    version: int
    num_groups: int
    num_dropped: int
    mean_reward: float


async def collect(
    config: Config, *, base_dir: Path, out: Path, num_batches: int, view: RunView
) -> Collected:
    """Collect batches with the run's newest checkpoint, or the starting model without one.

    Args:
        config: the whole configuration. Batches are collected one by one, whatever
            `rollout.asynchronous` says.
        base_dir: folder of the configuration file.
        out: the folder to write; a new one, or what an attempt left that began nothing.
        num_batches: how many batches of `rollout.batch_size` groups.
        view: the terminal view.

    Raises:
        ConfigError: `out` holds a run or answers, or the configuration replays recorded answers.
        RollmillError: something cannot be used as configured.
    """
    _check(config, out)
    place = RunDir(out)
    rollout = config.rollout.model_copy(update={"asynchronous": False})
    alone = config.model_copy(update={"rollout": rollout})
    policy = open_policy(alone)
    pool = open_pool(alone, policy, place)
    judge = Judge(alone.reward, seed=alone.run.seed, base_dir=base_dir)
    async with AsyncExitStack() as stack:
        stack.enter_context(RunLock(out))
        timeline = open_timeline(alone.telemetry, out)
        records = Records(
            MetricsLog(place.metrics), Trackers(), timeline, Dumps(alone.telemetry, out)
        )
        manager = _open_manager(
            stack,
            alone,
            policy,
            place,
            engines=TracedEngines(pool, timeline),
            judge=TracedGrader(ZeroReward(judge) if is_without_reward(alone) else judge, timeline),
            base_dir=base_dir,
            view=view,
        )
        named = alone.run.model_copy(update={"dir": out, "num_steps": num_batches})
        place.write_config(alone.model_copy(update={"run": named}))
        place.write_tokenizer(policy.tokenizer)
        manager.forget_everything()
        view.phase("starting engines and rewards")
        await stack.enter_async_context(judge)
        await stack.enter_async_context(pool)
        version = await serve_newest(
            stack, pool, alone, policy, work_dir=place, base_dir=base_dir, view=view
        )
        return await _collect(manager, records, version, num_batches, view)


def _check(config: Config, out: Path) -> None:
    if config.rollout.is_replay:
        raise ConfigError(
            "there is nothing to generate: the configuration replays recorded answers",
            where="rollout",
            expected="a configuration that has answers generated",
            fix="set rollout.source: generate, or look at the data itself",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            "the folder to write to is not empty",
            where=f"--out {out}",
            expected="a new folder",
            fix="choose another one",
        )


def _open_manager(
    stack: AsyncExitStack,
    config: Config,
    policy: Policy,
    place: RunDir,
    *,
    engines: Engines,
    judge: Grader,
    base_dir: Path,
    view: RunView,
) -> RolloutManager:
    hooks = load_hooks(config.rollout.hooks, base_dir)
    source = open_prompts(config, policy, hooks, base_dir)
    filters, key = config.rollout.filters, config.reward.reward_key
    ledger = Ledger(place.ledger)
    stack.callback(ledger.close)
    runner = make_runner(
        config,
        policy,
        pool=engines,
        judge=judge,
        hooks=hooks,
        new_index=source.new_index,
        base_dir=base_dir,
    )
    parts = RolloutParts(
        source=source,
        ledger=ledger,
        runner=runner,
        dynamic_filter=DynamicFilter(filters, reward_key=key, base_dir=base_dir),
        ranking=load_ranking(filters.over_sampling, reward_key=key, base_dir=base_dir),
        hooks=hooks,
        reward_key=key,
    )
    manager = RolloutManager(config.rollout, parts, view.progress)
    stack.push_async_callback(manager.close)
    return manager


async def _collect(
    manager: RolloutManager, records: Records, version: int, num_batches: int, view: RunView
) -> Collected:
    rewards, num_groups, num_dropped = [], 0, 0
    for number in range(1, num_batches + 1):
        view.phase(f"batch {number}: rollout")
        started = time.monotonic()
        with records.timeline.span("loop", "rollout"):
            batch = await manager.collect(step=number, version=version)
        seconds = {"time/rollout_s": time.monotonic() - started}
        await asyncio.to_thread(
            records.dumps.rollouts,
            number,
            batch.groups,
            rejected=batch.rejected,
            failed=batch.failed,
        )
        records.write("train", number, batch.metrics | seconds)
        view.step_done(number, batch.metrics | seconds)
        await records.step_done(number)
        rewards.append(batch.metrics["reward/mean"])
        num_groups += len(batch.groups)
        num_dropped += len(batch.rejected) + len(batch.failed)
    return Collected(version, num_groups, num_dropped, sum(rewards) / num_batches)
