"""What every weight transport must do, with a real trainer of two ranks and two embedded engines;
and what may go wrong with single ones.

All tests share the processes and run in the order of this file, one transport after the other; each
leaves a run whose engines serve its newest version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import VOCABULARY, make_tiny_model
from weight_run import HIDDEN_SIZE, WeightRun, weight_run

from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.types import GenerateResult
from rollmill.engine.weight_calls import WeightCalls
from rollmill.errors import EngineError
from rollmill.weights.folders import WeightsNotWritten

PROMPT = [5, 6, 7]
LONG = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
TRANSPORTS = ("disk", "distributed", "tensor", "delta")

Body = Callable[[WeightRun], Coroutine[Any, Any, None]]
Run = Callable[[Body], None]


Started = tuple[asyncio.Runner, WeightRun]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    opened = weight_run(tmp_path_factory.mktemp("weights"), num_ranks=2, bucket_mb=1)
    with asyncio.Runner() as runner:
        parts = runner.run(opened.__aenter__())
        try:
            yield runner, parts
        finally:
            runner.run(opened.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of another model of the same shape."""
    folder = tmp_path_factory.mktemp("stranger") / "model"
    return make_tiny_model(folder, seed=9, hidden_size=HIDDEN_SIZE, layers=2)


@pytest.fixture(scope="module", params=TRANSPORTS)
def run(request: pytest.FixtureRequest, started: Started) -> Iterator[Run]:
    runner, parts = started
    parts.use(request.param)

    def call(body: Body) -> None:
        runner.run(asyncio.wait_for(body(parts), 60))

    yield call
    runner.run(parts.transport.close())


async def ask(run: WeightRun, number: int) -> list[asyncio.Task[GenerateResult]]:
    """Long requests that are being written; every engine is slow enough to be caught at it."""
    for client in run.pool.clients:
        await client._post("/slow_down", {"forward_sleep_time": 0.02})
    tasks = [
        asyncio.create_task(run.pool.generate(f"r{i}", [*PROMPT, i % len(VOCABULARY)], LONG))
        for i in range(number)
    ]
    running = 0
    while running < number:
        loads = [load for client in run.pool.clients for load in await client.loads()]
        running = sum(load.num_running_reqs for load in loads)
    return tasks


async def hurry(run: WeightRun) -> None:
    for client in run.pool.clients:
        await client._post("/slow_down", {"forward_sleep_time": 0.0})


def set_mode(run: WeightRun, mode: str) -> None:
    run.transport._config = WeightsConfig(**run.config.weights.model_dump() | {"pause_mode": mode})


def test_engines_hold_the_trainers_bytes_after_every_sync(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        for factor in (1.0, 1.001, 0.5, 1.0, 1.02):  # changes none, some or all elements
            await run.train(factor)
            metrics = await run.sync()
            expected = await run.expected()
            assert await run.served() == [expected, expected]
            assert run.pool.expected_version == run.version
            result = await run.pool.generate("r", PROMPT, LONG)
            assert result.versions == (run.version,)
            assert 0 <= metrics["weights/update_s"] <= metrics["weights/pause_s"]
            assert metrics["weights/num_bytes"] > 0

    run(body)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_in_flight_are_kept(run: Run, mode: str) -> None:
    async def body(run: WeightRun) -> None:
        set_mode(run, mode)
        tasks = await ask(run, 8)
        await run.train()
        await run.sync()
        await hurry(run)
        results = await asyncio.gather(*tasks)
        assert [result.num_tokens for result in results] == [24] * 8
        assert {version for result in results for version in result.versions} <= {
            run.version - 1,
            run.version,
        }
        assert all(result.versions[-1] == run.version for result in results)

    run(body)


def test_a_sync_that_aborts_ends_requests_in_flight(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        set_mode(run, "abort")
        tasks = await ask(run, 4)
        await run.sync()
        await hurry(run)
        results = await asyncio.gather(*tasks)
        assert all(result.is_aborted for result in results)
        set_mode(run, "retract")

    run(body)


def test_a_failed_sync_keeps_the_old_weights(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        before, version = await run.served(), run.version
        for client in run.pool.clients:
            await client.release_memory(["weights"])  # then they refuse new ones
        await run.train()
        with pytest.raises(EngineError):
            await run.sync()
        for client in run.pool.clients:
            await client.resume_memory(["weights"])
        assert await run.served() == before
        assert run.pool.expected_version == version
        result = await run.pool.generate("r", PROMPT, LONG)
        assert result.versions == (version,)
        await run.sync()
        assert await run.served() == [await run.expected()] * 2

    run(body)


def test_a_full_disk_keeps_the_old_weights_and_the_trainer(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        if run.transport.__class__.__name__ == "DistributedTransport":
            return  # writes no file
        before, version, trainer = await run.served(), run.version, run.trainer.pid or 0
        limits = resource.prlimit(trainer, resource.RLIMIT_FSIZE)
        await run.train(1.5)
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (64, limits[1]))
        is_lent = run.transport.__class__.__name__ == "TensorTransport"  # in memory like a file
        with pytest.raises(EngineError if is_lent else WeightsNotWritten, match="File too large"):
            await run.sync()
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, limits)
        assert await run.served() == before
        assert run.pool.expected_version == version
        await run.sync()
        assert await run.served() == [await run.expected()] * 2

    run(body)


def test_a_sync_between_the_release_of_weights_and_of_the_cache(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        await run.pool.release_memory(["kv_cache", "weights"])
        await run.train()
        await run.pool.resume_memory(["weights"])
        await run.sync()
        await run.pool.resume_memory(["kv_cache"])
        assert await run.served() == [await run.expected()] * 2

    run(body)


def test_an_engine_with_weights_of_its_own_gets_the_served_ones_and_then_new_ones(
    run: Run, stranger: Path
) -> None:
    async def body(run: WeightRun) -> None:
        await run.train()
        await run.sync()
        expected = await run.expected()
        await run.train()  # the trainer is further on than the engines
        await run.pool.clients[0].update_weights_from_disk(str(stranger), 12345)
        while await run.served() != [expected, expected]:
            await asyncio.wait([asyncio.create_task(asyncio.sleep(0.02))])
        await run.sync()
        assert await run.served() == [await run.expected()] * 2
        tasks = [run.pool.generate(f"r{i}", PROMPT, LONG) for i in range(8)]
        assert {r.versions for r in await asyncio.gather(*tasks)} == {(run.version,)}

    run(body)


def test_the_shared_folder_holds_the_served_version_alone(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        names = [path.name for path in Path(run.config.weights.dir or "").glob("*/*")]
        assert names == [f"version_{run.version:08d}"]

    run(body)


class FilelessCalls(WeightCalls):
    """Calls to an engine that finds no file any more when it is to apply a difference."""

    async def apply_delta(self, path: str, version: int, *, prepared: int | None = None) -> None:
        Path(path).unlink(missing_ok=True)
        await super().apply_delta(path, version, prepared=prepared)


def test_differences_are_worked_out_before_generation_is_held(started: Started) -> None:
    async def body(run: WeightRun) -> None:
        run.use("delta")
        await run.sync()
        for client in run.pool.clients:
            client.weights = FilelessCalls(client._http)
        await run.train()
        metrics = await run.sync()
        assert metrics["weights/is_full_sync"] == 0
        assert await run.served() == [await run.expected()] * 2
        for client in run.pool.clients:
            client.weights = WeightCalls(client._http)
        await run.transport.close()

    runner, parts = started
    runner.run(asyncio.wait_for(body(parts), 60))


class DyingCalls(WeightCalls):
    """Calls to an engine that is killed when weights are about to come."""

    def __init__(self, client: EngineClient, pid: int) -> None:
        super().__init__(client._http)
        self._pid = pid

    async def receive(self, bucket: Sequence[Any], group: str, **options: Any) -> None:
        os.kill(self._pid, signal.SIGKILL)
        await super().receive(bucket, group, **options)


def test_a_broadcast_survives_an_engine_that_dies_in_it(started: Started) -> None:
    async def body(run: WeightRun) -> None:
        run.use("distributed")
        await run.sync()
        dying = run.pool.clients[0]
        dying.weights = DyingCalls(dying, run.pool.pids[0] or 0)
        await run.train()
        await run.sync()
        expected = await run.expected()
        assert await run.served() == [expected]
        dying.weights = WeightCalls(dying._http)
        await run.train()  # the trainer is further on than the engines
        await run.until_ready(2)
        assert await run.served() == [expected, expected]
        await run.sync()
        assert await run.served() == [await run.expected()] * 2
        await run.transport.close()

    runner, parts = started
    runner.run(asyncio.wait_for(body(parts), 120))


def test_a_difference_that_does_not_fit_an_engine_is_told_and_all_weights_go(
    started: Started, stranger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(run: WeightRun) -> None:
        run.use("delta")
        for _ in range(2):
            await run.train(1.001)
            metrics = await run.sync()
            assert await run.served() == [await run.expected()] * 2
        assert metrics["weights/is_full_sync"] == 0
        await run.pool.clients[1].update_weights_from_disk(str(stranger), run.version)
        await run.train(1.001)
        metrics = await run.sync()
        assert metrics["weights/is_full_sync"] == 1
        assert "gets all weights" in caplog.text
        assert await run.served() == [await run.expected()] * 2
        await run.transport.close()

    runner, parts = started
    with caplog.at_level(logging.WARNING):
        runner.run(asyncio.wait_for(body(parts), 60))
