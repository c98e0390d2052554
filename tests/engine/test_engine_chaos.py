"""Three engine processes; in mid-batch one is killed, one freezes, one is slow."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import scripted_engine
from random_model import write_random_model

from rollmill.config.engine import EmbeddedEngineConfig, EngineConfig
from rollmill.engine.launch import EMBEDDED_ENGINE
from rollmill.engine.pool import EnginePool

NUM_REQUESTS = 48
SAMPLING = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True}


def pids(pool: EnginePool) -> list[int]:
    return [member._process.pid for member in pool._members]  # type: ignore[union-attr]


async def slow_down(pid: int) -> None:
    """Let a process run one third of the time."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.02)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.01)


async def batch_under_fire(pool: EnginePool, weights: str) -> None:
    await pool.update_weights(weights, 3)
    killed, frozen, slow = pids(pool)
    slowing = asyncio.create_task(slow_down(slow))
    tasks = [
        asyncio.create_task(
            pool.generate(f"r{i}", [5, 6, i % 60], SAMPLING, session_id=f"g{i // 8}")
        )
        for i in range(NUM_REQUESTS)
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    os.kill(killed, signal.SIGKILL)
    os.kill(frozen, signal.SIGSTOP)
    try:
        results = await asyncio.gather(*tasks)
    finally:
        slowing.cancel()
        await asyncio.gather(slowing, return_exceptions=True)

    assert [result.num_tokens for result in results] == [60] * NUM_REQUESTS
    assert {result.versions for result in results} == {(3,)}
    assert all(result.counters.num_calls == 1 for result in results)  # nothing counted twice
    by_prompt: dict[int, set[tuple[int, ...]]] = {}
    for i, result in enumerate(results):
        by_prompt.setdefault(i % 60, set()).add(tuple(result.token_ids.tolist()))
    assert all(len(answers) == 1 for answers in by_prompt.values())
    assert pool.stats().num_redispatched > 0
    while pool.stats().num_ready < 3:
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0.05))])
    versions = [(await client.model_info()).weight_version for client in pool.clients]
    assert versions == ["3", "3", "3"]
    assert pool.stats().num_engine_deaths == 2
    assert pids(pool)[2] == slow  # slow is not dead


def run(config: EngineConfig, tmp_path: Path, model: str, program: Any) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(240),
            EnginePool(config, model_path=model, run_dir=tmp_path, program=program) as pool,
        ):
            await batch_under_fire(pool, model)

    asyncio.run(main())


def test_a_batch_survives_a_killed_a_frozen_and_a_slow_engine(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"token_s": 0.005, "vocab_size": 64}))
    program = (sys.executable, str(scripted_engine.__file__), "--script", str(script))
    config = EngineConfig(
        num_engines=3, health_interval_s=0.2, health_timeout_s=0.5, health_strikes=2
    )
    run(config, tmp_path, str(tmp_path), program)


def test_the_same_with_embedded_engines(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 0)
    config = EngineConfig(
        num_engines=3,
        health_interval_s=0.5,
        health_timeout_s=2.0,
        health_strikes=2,
        embedded=EmbeddedEngineConfig(num_threads=1, device="cpu", max_running_requests=4),
    )
    run(config, tmp_path, model, EMBEDDED_ENGINE)
