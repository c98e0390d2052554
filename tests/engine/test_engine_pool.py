from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_script import Call, Fault, Script
from scripted_engine import ScriptedEngine

from rollmill.config.engine import EngineConfig
from rollmill.engine.errors import (
    EngineCallError,
    EngineFailed,
    EngineLost,
    EngineRefused,
    EngineTimeout,
    WrongVersion,
)
from rollmill.engine.pool import EnginePool
from rollmill.engine.types import FinishReason, GenerateResult

Body = Callable[[list[ScriptedEngine], EnginePool], Coroutine[Any, Any, None]]
FAST = {"health_interval_s": 0.1, "health_timeout_s": 0.3, "start_timeout_s": 10.0}
LIMIT = {"max_new_tokens": 50}


@asynccontextmanager
async def attached(
    scripts: list[Script], tmp_path: Path, **config: Any
) -> AsyncIterator[tuple[list[ScriptedEngine], EnginePool]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(s)) for s in scripts]
        urls = tuple(engine.url for engine in engines)
        settings = EngineConfig(urls=urls, **(FAST | config))
        pool = EnginePool(settings, model_path="none", run_dir=tmp_path)
        yield engines, await stack.enter_async_context(pool)


def run(scripts: Script | list[Script], tmp_path: Path, body: Body, **config: Any) -> None:
    async def main() -> None:
        many = scripts if isinstance(scripts, list) else [scripts]
        async with asyncio.timeout(30), attached(many, tmp_path, **config) as (engines, pool):
            await body(engines, pool)

    asyncio.run(main())


def ask(pool: EnginePool, rid: str, **options: Any) -> asyncio.Task[GenerateResult]:
    return asyncio.create_task(pool.generate(rid, [5, 6, 7], LIMIT, **options))


async def until(pool: EnginePool, condition: Callable[[], bool]) -> None:
    """Poll the pool; the engines cannot tell us when it has noticed something."""
    while not condition():
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0.01))])


def test_concurrency_counts_requests_and_never_exceeds_the_limit(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        tasks = [ask(pool, str(i)) for i in range(40)]
        results = await asyncio.gather(*tasks)
        assert all(result.finish is FinishReason.STOP for result in results)
        assert engines[0].max_running_seen == 4
        assert pool.stats().num_in_flight == 0
        assert pool.stats().outstanding_tokens == 0

    run(Script(token_s=0.0002), tmp_path, body, max_concurrent_requests=4)


def test_requests_spread_over_engines_and_sessions_stay_together(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        for engine in engines:
            engine.hold()
        tasks = [
            ask(pool, f"{group}-{i}", session_id=f"group-{group}")
            for group in range(6)
            for i in range(4)
        ]
        await asyncio.gather(*(engine.wait_for_running(8) for engine in engines))
        for engine in engines:
            groups = [run.call.routing_key for run in engine.running.values()]
            assert len(set(groups)) == 2
            engine.release()
        await asyncio.gather(*tasks)

    run([Script()] * 3, tmp_path, body)


def test_abort_returns_partial_answers_and_empty_ones_for_waiting_requests(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        tasks = [ask(pool, str(i)) for i in range(6)]
        await engines[0].wait_until(lambda: sum(r.done for r in engines[0].running.values()) == 6)
        report = await pool.abort_all(5.0)
        results = await asyncio.gather(*tasks)
        assert all(result.is_aborted for result in results)
        assert sorted(result.num_tokens for result in results) == [0, 0, 0, 0, 3, 3]
        assert [result.counters.num_calls for result in results].count(0) == 4
        assert (report.num_aborted, report.num_unanswered) == (6, 0)
        assert engines[0].counts["/generate"] == 2

    script = Script(faults=(Fault("stall", after=3),))
    run(script, tmp_path, body, max_concurrent_requests=2)


def test_the_abort_of_one_request_leaves_those_whose_ids_begin_like_it_alone(
    tmp_path: Path,
) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        (engine,) = engines
        engine.hold()
        names = ("train/1/4", "train/1/41", "train/2/4", "train/2/41", "train/2/4/1", "eval/a/2/4")
        asked = {name: ask(pool, name) for name in names}
        await engine.wait_for_running(2)  # the first two; the others wait at the gate
        for name in ("train/2/4", "train/1/4"):  # one that waits, one at the engine
            report = await pool.abort(name, 5.0)
            assert (report.num_aborted, report.num_unanswered) == (1, 0)
            assert (await asked.pop(name)).is_aborted
        assert "abort_all" not in engine.events
        engine.release()
        answers = [await task for task in asked.values()]
        assert [answer.finish for answer in answers] == [FinishReason.STOP] * 4

    run(Script(), tmp_path, body, max_concurrent_requests=2)


def test_requests_after_an_abort_run_normally(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        await pool.abort_all(1.0)
        assert (await ask(pool, "a")).finish is FinishReason.STOP

    run(Script(), tmp_path, body)


def test_an_abort_ends_by_its_deadline_when_an_engine_does_not_answer(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        deaf, good = engines
        deaf.answers_aborts = False
        tasks = [ask(pool, str(i)) for i in range(4)]
        await asyncio.gather(deaf.wait_for_running(2), good.wait_for_running(2))
        started = asyncio.get_running_loop().time()
        report = await pool.abort_all(0.5)
        assert asyncio.get_running_loop().time() - started < 2.0
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert (report.num_aborted, report.num_unanswered) == (2, 2)
        assert sum(isinstance(result, EngineTimeout) for result in results) == 2
        assert sum(getattr(result, "is_aborted", False) for result in results) == 2

    script = Script(faults=(Fault("stall", after=1),))
    run([script, script], tmp_path, body)


def test_an_abort_that_an_engine_loses_is_sent_again(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        (engine,) = engines
        engine.obeys_aborts = False
        task = ask(pool, "a")
        await engine.wait_for_running(1)
        abort = asyncio.create_task(pool.abort_all(10.0))
        await engine.wait_until(lambda: engine.counts["/abort_request"] == 1)
        engine.obeys_aborts = True
        assert (await abort).num_unanswered == 0
        assert (await task).is_aborted

    run(Script(faults=(Fault("stall"),)), tmp_path, body)


def test_attached_engines_have_only_our_own_requests_aborted(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        task = ask(pool, "a")
        await engines[0].wait_for_running(1)
        await pool.abort_all(5.0)
        await task
        assert "abort_all" not in engines[0].events

    run(Script(faults=(Fault("stall"),)), tmp_path, body)


def test_new_weights_are_confirmed_and_become_the_expected_version(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        assert pool.expected_version is None
        assert (await ask(pool, "a")).versions == (0,)
        await pool.update_weights(str(tmp_path), 1)
        assert pool.expected_version == 1
        assert (await ask(pool, "b")).versions == (1,)

    run([Script(version="default")] * 2, tmp_path, body)


def test_tokens_of_a_version_nobody_handed_out_are_an_error(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        await pool.update_weights(str(tmp_path), 1)
        with pytest.raises(WrongVersion, match="weight version 999999"):
            await ask(pool, "a")
        assert (await ask(pool, "b")).versions == (1,)  # after the engine was renewed
        assert engines[0].events.count("update:1") == 2

    run(Script(faults=(Fault("wrong_version", times=1),)), tmp_path, body)


def test_an_update_in_flight_may_show_both_versions(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        await pool.update_weights(str(tmp_path), 1)
        task = ask(pool, "a")
        await engines[0].wait_for_running(1)
        await asyncio.wait([task], timeout=0.1)
        await pool.pause_all("retract")
        held = ask(pool, "b")
        await pool.update_weights(str(tmp_path), 2)
        await pool.resume_all()
        assert (await task).versions == (1, 2)
        assert (await held).versions == (2,)

    run(Script(length=30, token_s=0.01), tmp_path, body)


def test_a_failed_update_leaves_the_old_version_expected_and_served(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        await pool.update_weights(str(tmp_path), 1)
        engines[0].fails_updates = True
        with pytest.raises(EngineRefused, match="weights iterator"):
            await pool.update_weights(str(tmp_path), 2)
        assert pool.expected_version == 1
        assert (await ask(pool, "a")).versions == (1,)

    run(Script(), tmp_path, body)


def test_an_engine_that_says_it_serves_another_version_fails_the_update(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        engines[0].reported_version = "41"
        with pytest.raises(WrongVersion, match="weight version 1"):
            await pool.update_weights(str(tmp_path), 1)

    run(Script(), tmp_path, body)


def test_one_engine_failing_an_update_is_renewed_before_it_gets_requests(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        bad, good = engines
        bad.fails_updates = True
        await pool.update_weights(str(tmp_path), 1)
        results = await asyncio.gather(*(ask(pool, str(i)) for i in range(4)))
        assert {result.versions for result in results} == {(1,)}
        assert (bad.counts["/generate"], good.counts["/generate"]) == (0, 4)
        bad.fails_updates = False
        await until(pool, lambda: pool.stats().num_ready == 2)
        assert bad.version == "1"

    run([Script()] * 2, tmp_path, body)


def test_an_engine_restarted_behind_our_back_gets_the_current_weights(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        await pool.update_weights(str(tmp_path), 3)
        await engines[0].stop()
        await engines[0].start()
        assert engines[0].version == "0"
        await engines[0].wait_until(lambda: engines[0].version == "3")
        assert (await ask(pool, "a")).versions == (3,)

    run(Script(), tmp_path, body)


def test_requests_of_a_dead_engine_are_answered_by_another(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        for engine in engines:
            engine.hold()
        tasks = [ask(pool, str(i)) for i in range(8)]
        await asyncio.gather(*(engine.wait_for_running(4) for engine in engines))
        await engines[0].stop()
        engines[1].release()
        results = await asyncio.gather(*tasks)
        assert [result.finish for result in results] == [FinishReason.STOP] * 8
        assert pool.stats().num_redispatched == 4

    run([Script()] * 2, tmp_path, body, max_retries=1)


def test_a_hung_engine_loses_its_requests_to_another_and_comes_back(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        hung = engines[0]
        hung.hold()
        tasks = [ask(pool, str(i)) for i in range(8)]
        await hung.wait_for_running(4)
        hung.answers_health = False
        results = await asyncio.gather(*tasks)
        assert [result.finish for result in results] == [FinishReason.STOP] * 8
        assert pool.stats().num_engine_deaths == 1
        hung.answers_health = True
        hung.release()
        await until(pool, lambda: pool.stats().num_ready == 2)

    run([Script()] * 2, tmp_path, body, health_strikes=2)


def test_a_request_that_kills_every_engine_is_failed(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        with pytest.raises(EngineCallError):
            await ask(pool, "poison")
        assert sum(len(engine.requests) for engine in engines) <= 4
        assert (await ask(pool, "good")).finish is FinishReason.STOP

    script = Script(faults=(Fault("cut", rid="poison"),))
    run([script] * 2, tmp_path, body, max_retries=1)


def test_a_500_reaches_the_caller_and_the_engine_goes_on(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        with pytest.raises(EngineFailed):
            await ask(pool, "a")
        assert (await ask(pool, "b")).finish is FinishReason.STOP

    run(Script(faults=(Fault("http", nth=(0,)),)), tmp_path, body)


def test_a_cancelled_request_gives_its_place_back(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        engines[0].hold()
        task = ask(pool, "a")
        await engines[0].wait_for_running(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engines[0].release()
        assert (await ask(pool, "b")).finish is FinishReason.STOP
        assert pool.stats().outstanding_tokens == 0

    run(Script(), tmp_path, body, max_concurrent_requests=1)


def test_no_request_starts_while_the_pool_is_paused(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        await pool.pause_all("in_place")
        task = ask(pool, "a")
        await asyncio.wait([task], timeout=0.05)
        assert engines[0].counts["/generate"] == 0
        await pool.resume_all()
        assert (await task).finish is FinishReason.STOP
        assert engines[0].events == ["pause:in_place", "continue"]

    run(Script(), tmp_path, body)


def test_an_engine_that_is_not_there_stops_the_start_with_its_address(tmp_path: Path) -> None:
    async def main() -> None:
        config = EngineConfig(urls=("http://127.0.0.1:9",), start_timeout_s=0.3)
        pool = EnginePool(config, model_path="none", run_dir=tmp_path)
        with pytest.raises(EngineTimeout, match=r"http://127\.0\.0\.1:9"):
            await pool.start()

    asyncio.run(main())


def test_closing_the_pool_ends_requests_in_flight_and_leaves_no_task(tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedEngine(Script()) as engine:
            engine.hold()
            config = EngineConfig(urls=(engine.url,), max_concurrent_requests=1, **FAST)
            async with EnginePool(config, model_path="none", run_dir=tmp_path) as pool:
                tasks = [ask(pool, "a"), ask(pool, "b")]
                await engine.wait_for_running(1)
            first, second = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(first, EngineLost)
            assert isinstance(second, GenerateResult)
            assert second.is_aborted
            assert len(asyncio.all_tasks()) <= 2  # this one and the engine's

    asyncio.run(main())


def test_the_same_script_gives_the_same_answers_whatever_the_concurrency(tmp_path: Path) -> None:
    seen: list[list[list[int]]] = []

    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        results = await asyncio.gather(*(ask(pool, str(i)) for i in range(12)))
        seen.append([result.token_ids.tolist() for result in results])

    def length(call: Call) -> int:
        return 3 + len(call.name)

    run(Script(length=length), tmp_path, body, max_concurrent_requests=1)
    run([Script(length=length)] * 2, tmp_path, body, max_concurrent_requests=12)
    assert seen[0] == seen[1]
    assert len({tuple(ids) for ids in seen[0]}) == 12
