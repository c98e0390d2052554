"""Engines that serve a run's weights while nothing trains."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from rollmill.config.load import load_config
from rollmill.loop.policy import open_policy, open_pool
from rollmill.loop.run_dir import RunDir
from rollmill.loop.serving import serve_newest
from rollmill.telemetry.console import RunView
from support.tiny_run import rollmill, write_tiny_run

LIMIT = {"max_new_tokens": 2}


def test_an_engine_that_dies_while_a_run_is_served_comes_back_with_its_weights(
    tmp_path: Path,
) -> None:
    """By `delta`, where the trainer has to give them once more."""
    path = write_tiny_run(
        tmp_path,
        run__num_steps=1,
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=4,
        eval__datasets=[],
        engine__health_interval_s=0.2,
        weights__transport="delta",
    )
    trained = rollmill("train", path)
    assert trained.returncode == 0, trained.stderr
    config = load_config(path)
    run = RunDir(config.run.dir)

    async def main() -> None:
        policy = open_policy(config)
        async with asyncio.timeout(180), AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(config, policy, run))
            view = RunView(is_on=False, num_steps=1)
            served = await serve_newest(
                stack, pool, config, policy, work_dir=run, base_dir=tmp_path, view=view
            )
            assert served == 1
            (before,) = (await pool.checksums()).values()
            (pid,) = pool.pids
            os.kill(pid or 0, signal.SIGKILL)
            while pool.pids == [pid] or not pool.stats().num_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            (after,) = (await pool.checksums()).values()
            assert after.by_weight == before.by_weight
            assert (await pool.generate("a", [5, 6], LIMIT)).versions == (1,)

    asyncio.run(main())
