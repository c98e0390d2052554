"""The real SGLang router in front of scripted and of embedded engines, where it is installed.

Set ROLLMILL_ROUTER_PYTHON to the Python of an environment that has sglang-router.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import scripted_engine
from random_model import write_random_model

from rollmill.config.engine import EmbeddedEngineConfig, EngineConfig
from rollmill.engine.errors import EngineRefused, EngineStartError
from rollmill.engine.launch import EMBEDDED_ENGINE
from rollmill.engine.pool import EnginePool

PYTHON = os.environ.get("ROLLMILL_ROUTER_PYTHON") or (
    sys.executable if importlib.util.find_spec("sglang_router") else None
)
with_router = pytest.mark.skipif(PYTHON is None, reason="sglang-router is not installed")
LIMIT = {"max_new_tokens": 50}


def run(
    tmp_path: Path,
    body: Callable[[EnginePool], Coroutine[Any, Any, None]],
    *,
    router: tuple[str, ...] | None = None,
    **script: Any,
) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))

    async def main() -> None:
        config = EngineConfig(
            num_engines=2,
            router="sglang",
            start_timeout_s=20,
            health_interval_s=0.2,
            health_timeout_s=1.0,
        )
        pool = EnginePool(
            config,
            model_path="model",
            run_dir=tmp_path,
            program=(sys.executable, str(scripted_engine.__file__), "--script", str(path)),
            router_program=router or (str(PYTHON), "-m", "sglang_router.launch_router"),
        )
        async with asyncio.timeout(60), pool:
            await body(pool)

    asyncio.run(main())


@with_router
def test_requests_and_weight_updates_go_through(tmp_path: Path) -> None:
    async def body(pool: EnginePool) -> None:
        results = await asyncio.gather(*(pool.generate(str(i), [5, i], LIMIT) for i in range(10)))
        assert {result.versions for result in results} == {(0,)}
        await pool.pause_all("retract")
        await pool.update_weights(str(tmp_path), 1)
        await pool.resume_all()
        assert (await pool.generate("a", [5], LIMIT)).versions == (1,)

    run(tmp_path, body)


@with_router
def test_requests_of_one_session_go_to_one_engine(tmp_path: Path) -> None:
    async def body(pool: EnginePool) -> None:
        tasks = [
            asyncio.create_task(pool.generate(f"{g}-{i}", [5, g], LIMIT, session_id=f"g{g}"))
            for g in range(8)
            for i in range(3)
        ]
        loads: list[int] = []
        while sum(loads) < 24:
            loads = [(await client.loads())[0].num_running_reqs for client in pool.clients]
        assert loads[0] % 3 == 0
        assert loads[1] % 3 == 0
        await asyncio.gather(*tasks)

    run(tmp_path, body, token_s=0.1)


@with_router
def test_a_batch_survives_a_killed_engine_which_comes_back_with_the_weights(
    tmp_path: Path,
) -> None:
    async def body(pool: EnginePool) -> None:
        await pool.update_weights(str(tmp_path), 4)
        tasks = [asyncio.create_task(pool.generate(str(i), [5, i], LIMIT)) for i in range(20)]
        await asyncio.wait(tasks, timeout=0.1)
        os.kill(pool._members[0]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        results = await asyncio.gather(*tasks)
        assert {result.versions for result in results} == {(4,)}
        while pool.stats().num_ready < 2:
            results = await asyncio.gather(
                *(pool.generate(str(i), [5, i], LIMIT) for i in range(4))
            )
            assert {result.versions for result in results} == {(4,)}

    run(tmp_path, body, token_s=0.05)


@with_router
def test_an_abort_reaches_the_engine_behind_the_router(tmp_path: Path) -> None:
    async def body(pool: EnginePool) -> None:
        tasks = [asyncio.create_task(pool.generate(str(i), [5, i], LIMIT)) for i in range(6)]
        loads: list[int] = []
        while sum(loads) < 6:
            loads = [(await client.loads())[0].num_running_reqs for client in pool.clients]
        report = await pool.abort_all(5.0)
        assert (report.num_aborted, report.num_unanswered) == (6, 0)
        assert all(result.is_aborted for result in await asyncio.gather(*tasks))

    run(tmp_path, body, token_s=1.0)


@with_router
def test_a_killed_router_is_started_again_and_no_request_is_lost(tmp_path: Path) -> None:
    async def body(pool: EnginePool) -> None:
        tasks = [asyncio.create_task(pool.generate(str(i), [5, i], LIMIT)) for i in range(6)]
        await asyncio.wait(tasks, timeout=0.1)
        assert pool._router is not None
        os.kill(pool._router._process.pid or 0, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert [result.num_tokens for result in results] == [8] * 6

    run(tmp_path, body, token_s=0.05)


@with_router
def test_what_the_router_would_drop_is_refused(tmp_path: Path) -> None:
    async def body(pool: EnginePool) -> None:
        with pytest.raises(EngineRefused, match="return_routed_experts"):
            await pool.generate("a", [5], LIMIT, return_routed_experts=True)
        with pytest.raises(EngineRefused, match="logit_bias"):
            await pool.generate("a", [5], LIMIT | {"logit_bias": {"5": 1.0}})

    run(tmp_path, body)


def test_a_router_that_cannot_start_shows_why(tmp_path: Path) -> None:
    async def body(pool: EnginePool) -> None:
        raise AssertionError("unreachable")

    router = (sys.executable, "-c", "import a_router_that_is_not_there")
    with pytest.raises(EngineStartError, match="No module named 'a_router_that_is_not_there'"):
        run(tmp_path, body, router=router)


@with_router
def test_embedded_engines_behind_it_keep_sessions_together_and_survive_a_kill(
    tmp_path: Path,
) -> None:
    model = write_random_model(tmp_path / "model", 0)
    config = EngineConfig(
        num_engines=2,
        router="sglang",
        health_interval_s=0.5,
        health_timeout_s=5.0,
        embedded=EmbeddedEngineConfig(num_threads=1, device="cpu", max_running_requests=4),
    )
    greedy = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True}

    async def turns(pool: EnginePool, session: int) -> list[int]:
        """Tokens of its prompt that each turn of one conversation found in an engine's cache."""
        context, cached = [session + 2] * 40, []
        for turn in range(3):
            name = f"session-{session}"
            result = await pool.generate(f"{name}-{turn}", context, greedy, session_id=name)
            cached.append(result.counters.cached_tokens)
            context += result.token_ids.tolist()
        return cached

    async def main() -> None:
        pool = EnginePool(
            config,
            model_path=model,
            run_dir=tmp_path,
            program=EMBEDDED_ENGINE,
            router_program=(str(PYTHON), "-m", "sglang_router.launch_router"),
        )
        async with asyncio.timeout(400), pool:
            await pool.update_weights(model, 4)
            found = await asyncio.gather(*(turns(pool, session) for session in range(8)))
            assert all(min(cached[1:]) > 40 for cached in found), found
            prompts = [[5, 6, i] for i in range(24)]
            tasks = [
                asyncio.create_task(pool.generate(f"r{i}", prompt, greedy))
                for i, prompt in enumerate(prompts)
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            os.kill(pool._members[0]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            results = await asyncio.gather(*tasks)
            assert [(r.num_tokens, r.versions) for r in results] == [(60, (4,))] * 24
            while pool.stats().num_ready < 2:
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0.05))])
            versions = [(await client.model_info()).weight_version for client in pool.clients]
            assert versions == ["4", "4"]

    asyncio.run(main())
