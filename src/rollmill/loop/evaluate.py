"""`rollmill eval`: evaluate without training."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rollmill.config import Config
from rollmill.errors import ConfigError
from rollmill.loop.policy import open_evaluator, open_policy, open_pool
from rollmill.loop.run_dir import RunDir, RunLock
from rollmill.loop.serving import serve_newest
from rollmill.rollout.evaluate import EvalResult
from rollmill.rollout.hooks import load_hooks
from rollmill.sample import flatten
from rollmill.telemetry.console import RunView


async def evaluate(config: Config, *, base_dir: Path, view: RunView) -> EvalResult:
    """Evaluate the run's newest checkpoint, or the starting model when there is none.

    Raises:
        ConfigError: there are no evaluation sets.
        RollmillError: something cannot be used as configured.
    """
    if not config.eval.datasets:
        raise ConfigError(
            "there is nothing to evaluate on",
            where="eval.datasets",
            expected="at least one set",
            fix="add `eval: {datasets: [{name: held_out, data: {path: eval.jsonl}}]}`",
        )
    run_dir = RunDir(config.run.dir)
    policy = open_policy(config)
    pool = open_pool(config, policy, run_dir)
    hooks = load_hooks(config.rollout.hooks, base_dir)
    evaluator = open_evaluator(config, policy, pool, hooks, base_dir)
    async with AsyncExitStack() as stack:
        stack.enter_context(RunLock(run_dir.root))
        view.phase("starting engines")
        await stack.enter_async_context(evaluator)
        await stack.enter_async_context(pool)
        step = await serve_newest(
            stack, pool, config, policy, work_dir=run_dir, base_dir=base_dir, view=view
        )
        view.phase("eval")
        result = await evaluator.run(step)
        shown = [
            sample
            for groups in result.groups.values()
            for sample in flatten(groups)[: config.telemetry.num_printed_samples]
        ]
        view.eval_done(step, result.metrics, shown)
        return result
