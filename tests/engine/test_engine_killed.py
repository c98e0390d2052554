"""Real embedded engines, killed in mid-answer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from random_model import write_random_model

from rollmill.config.engine import EmbeddedEngineConfig, EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.pool import EnginePool
from rollmill.engine.types import GenerateResult

LENGTH = 48
PROMPTS = [[5, 9, 12, 7 + i] for i in range(3)]


def sampling(number: int) -> dict[str, Any]:
    return {
        "max_new_tokens": LENGTH,
        "temperature": 1.0,
        "ignore_eos": True,
        "sampling_seed": 100 + number,
    }


async def answers(pool: EnginePool) -> list[GenerateResult]:
    """Three answers of one engine: requests of one session stay together."""
    calls = (
        pool.generate(f"r{i}", prompt, sampling(i), session_id="one")
        for i, prompt in enumerate(PROMPTS)
    )
    return await asyncio.gather(*calls)


async def num_written(client: EngineClient) -> float:
    """Tokens that an engine has written since its start."""
    lines = (await client._http.call("GET", "/metrics", timeout_s=10)).decode().splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("sglang:generation_tokens"))


async def until_half_way(clients: list[EngineClient]) -> int:
    """The number of the engine that writes; it has written half of each answer from now on."""
    before = [await num_written(client) for client in clients]
    while True:
        for number, client in enumerate(clients):
            if await num_written(client) - before[number] >= len(PROMPTS) * LENGTH // 2:
                return number
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0.005))])


def test_tokens_of_a_killed_engine_are_kept_and_the_answer_is_the_undisturbed_one(
    tmp_path: Path,
) -> None:
    config = EngineConfig(
        num_engines=2,
        health_interval_s=60,  # the broken connections are news enough
        stream_interval=4,
        embedded=EmbeddedEngineConfig(num_threads=1, device="cpu"),
    )
    model = write_random_model(tmp_path / "model", 0)

    async def main() -> None:
        pool = EnginePool(config, model_path=model, run_dir=tmp_path, context_length=256)
        async with asyncio.timeout(100), pool:
            undisturbed = await answers(pool)
            for client in pool.clients:
                await client._post("/slow_down", {"forward_sleep_time": 0.02})
            task = asyncio.create_task(answers(pool))
            writer = await until_half_way(pool.clients)
            killed = pool._members[writer].pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            disturbed = await task
            stats = pool.stats()
        assert stats.num_redispatched == len(PROMPTS)
        # a piece of each may be on its way when the engine dies, and one be begun
        assert stats.num_kept_tokens >= len(PROMPTS) * (LENGTH // 2 - 8)
        for one, other in zip(undisturbed, disturbed, strict=True):
            assert other.token_ids.tolist() == one.token_ids.tolist()
            np.testing.assert_allclose(other.log_probs, one.log_probs, atol=1e-4)
            assert other.spans == one.spans
            assert other.finish is one.finish
            assert other.counters.num_calls == 1
            assert other.counters.prompt_tokens >= one.counters.prompt_tokens + LENGTH // 4

    asyncio.run(main())


def test_an_engine_that_dies_while_its_memory_is_released_comes_back(tmp_path: Path) -> None:
    config = EngineConfig(
        health_interval_s=0.1,
        embedded=EmbeddedEngineConfig(num_threads=1, device="cpu"),
    )
    model = write_random_model(tmp_path / "model", 0)

    async def main() -> None:
        pool = EnginePool(config, model_path=model, run_dir=tmp_path, context_length=256)
        async with asyncio.timeout(200), pool:

            async def until_ready() -> None:
                while not pool.stats().num_ready:
                    await asyncio.wait([asyncio.create_task(asyncio.sleep(0.01))])

            await pool.release_memory(["kv_cache", "weights"])
            (killed,) = pool.pids
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            while not pool.stats().num_engine_deaths:
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0.01))])
            assert pool.pids == [None]
            await pool.resume_memory(["weights"])
            await until_ready()  # it was started with all its memory: there is none to take again
            await pool.resume_memory(["kv_cache"])
            result = await pool.generate("r", PROMPTS[0], sampling(0))
            assert result.num_tokens == LENGTH
            assert pool.stats().num_engine_deaths == 1
            await pool.release_memory(["kv_cache", "weights"])
            await pool.resume_memory(["kv_cache", "weights"])
            assert pool.stats().num_ready == 1

    asyncio.run(main())
