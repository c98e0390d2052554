"""Engines whose generation is held: drained first, and still watched over."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from engine_script import Script
from scripted_engine import ScriptedEngine

from rollmill.config.engine import EngineConfig
from rollmill.engine.pool import EnginePool
from rollmill.engine.types import FinishReason


@asynccontextmanager
async def pool_of(
    number: int, folder: Path
) -> AsyncIterator[tuple[list[ScriptedEngine], EnginePool]]:
    async with AsyncExitStack() as stack:
        script = Script(length=8)
        engines = [await stack.enter_async_context(ScriptedEngine(script)) for _ in range(number)]
        config = EngineConfig(
            urls=tuple(engine.url for engine in engines),
            health_interval_s=0.1,
            health_timeout_s=0.3,
            health_strikes=2,
        )
        pool = EnginePool(config, model_path="none", run_dir=folder)
        yield engines, await stack.enter_async_context(pool)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event for what tests look at
        await asyncio.sleep(0)


def test_a_drain_waits_for_running_requests_and_holds_new_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(1, tmp_path) as ((engine,), pool):
            engine.hold()
            running = asyncio.create_task(pool.generate("a", [3], {"max_new_tokens": 20}))
            await engine.wait_for_running(1)
            pausing = asyncio.create_task(pool.pause_all("drain"))
            await asyncio.sleep(0)
            late = asyncio.create_task(pool.generate("b", [3], {"max_new_tokens": 20}))
            await until(lambda: pool.stats().num_waiting == 1)
            assert not pausing.done()
            assert engine.events == []
            engine.release()
            await pausing
            result = await running
            assert result.finish is FinishReason.STOP
            assert engine.events == ["pause:retract"]
            assert len(engine.requests) == 1
            await pool.resume_all()
            assert (await late).finish is FinishReason.STOP

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_engine_that_hangs_while_it_is_held_is_found_out(tmp_path: Path, mode: str) -> None:
    async def main() -> None:
        async with pool_of(2, tmp_path) as (engines, pool):
            await pool.pause_all(mode)  # type: ignore[arg-type]
            await until(lambda: all(engine.counts["/ping"] >= 2 for engine in engines))
            assert pool.stats().num_ready == 2, "a held engine that answers is fine"
            engines[0].answers_health = False
            await until(lambda: pool.stats().num_engine_deaths == 1)
            assert pool.stats().num_ready == 1

    asyncio.run(asyncio.wait_for(main(), 30))
