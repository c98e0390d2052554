"""Weights handed over by handle: the same bits as through files, and what is left when one dies.

Most tests share one run, in the order of this file; the last of them kills its trainer.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from engine_script import Script
from scripted_engine import ScriptedEngine
from weight_run import WeightRun, weight_run

from rollmill.config.engine import EngineConfig
from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineRefused
from rollmill.engine.pool import EnginePool
from rollmill.engine.server_info import ServerInfo
from rollmill.engine.types import GenerateResult
from rollmill.engine.weight_calls import WeightCalls
from rollmill.errors import ConfigError, WorkerError
from rollmill.exchange.machine import machine_name
from rollmill.exchange.specs import plan_buckets
from rollmill.weights.tensor import TensorTransport, check_engine

PROMPT = [5, 6, 7]
LONG = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 3}
LENT = "memfd:rollmill-weights"

Body = Callable[[WeightRun], Coroutine[Any, Any, None]]
Run = Callable[[Body], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    opened = weight_run(
        tmp_path_factory.mktemp("tensor"),
        num_ranks=2,
        trainer_config={"lora": {"rank": 4}},
        transport="tensor",
        bucket_mb=1,
    )
    with asyncio.Runner() as runner:
        parts = runner.run(opened.__aenter__())

        def call(body: Body) -> None:
            runner.run(asyncio.wait_for(body(parts), 120))

        try:
            yield call
        finally:
            runner.run(opened.__aexit__(None, None, None))


async def answer(run: WeightRun) -> GenerateResult:
    return await run.pool.generate("r", PROMPT, LONG)


def lent_by(pid: int | None) -> list[str]:
    """Descriptors of memory that a process lends."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if LENT in link]


def borrowed_by(pid: int | None) -> bool:
    return LENT in Path(f"/proc/{pid}/maps").read_text()


def test_log_probs_are_those_after_a_sync_through_files_bit_for_bit(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        await run.sync()
        assert len(plan_buckets(run.transport._next.specs, 1 << 20)) > 2
        first = await answer(run)
        await run.trainer.call("shift", amount=0.02)  # the adapters of both ranks
        await run.sync()
        by_handle = await answer(run)
        assert by_handle.log_probs.tolist() != first.log_probs.tolist()
        await run.transport.close()
        run.use("disk")
        await run.sync()
        by_file = await answer(run)
        await run.transport.close()
        run.use("tensor")
        assert by_file.versions != by_handle.versions
        assert by_file.token_ids.tolist() == by_handle.token_ids.tolist()
        assert by_file.log_probs.tolist() == by_handle.log_probs.tolist()

    run(body)


def test_nothing_stays_lent_after_a_sync(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        await run.trainer.call("shift", amount=0.02)
        await run.sync()
        assert lent_by(run.trainer.pid) == []
        assert not any(borrowed_by(pid) for pid in run.pool.pids)

    run(body)


class ForgetfulCalls(WeightCalls):
    """Calls to an engine that does not know of a session any more when it is to end it."""

    async def end(self, *, timeout_s: float) -> None:
        await self.discard(timeout_s=timeout_s)
        await super().end(timeout_s=timeout_s)


def test_an_engine_that_lost_what_it_copied_is_renewed(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        client = run.pool.clients[0]
        client.weights = ForgetfulCalls(client._http)
        await run.trainer.call("shift", amount=0.02)
        await run.sync()
        client.weights = WeightCalls(client._http)
        await run.until_ready(2)
        assert await run.served() == [await run.expected()] * 2

    run(body)


class WatchingCalls(WeightCalls):
    """Calls to an engine that note whether it was held when it copied."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client._http)
        self.modes: list[str | None] = []

    async def copy(self, bucket: Sequence[Any], handle: Mapping[str, Any], **options: Any) -> None:
        info = orjson.loads(await self._http.call("GET", "/server_info", timeout_s=10))
        self.modes.append(info["internal_states"][0]["pause_mode"])
        await super().copy(bucket, handle, **options)


def test_engines_copy_while_generation_goes_on(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        client = run.pool.clients[0]
        client.weights = calls = WatchingCalls(client)
        await run.trainer.call("shift", amount=0.02)
        await run.sync()
        client.weights = WeightCalls(client._http)
        assert len(calls.modes) > 2
        assert set(calls.modes) == {None}

    run(body)


class SpoiledCalls(WeightCalls):
    """Calls to an engine that gets other checksums than the trainer's with one bucket."""

    error: EngineRefused | None = None

    async def copy(self, bucket: Sequence[Any], handle: Mapping[str, Any], **options: Any) -> None:
        if options["version"] is not None:
            options["checksums"] = ["00000000"] * len(bucket)
        try:
            await super().copy(bucket, handle, **options)
        except EngineRefused as error:
            self.error = error
            raise


def test_an_engine_whose_copy_is_damaged_keeps_the_old_weights_and_is_renewed(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        spoiled = run.pool.clients[0]
        spoiled.weights = calls = SpoiledCalls(spoiled._http)
        await run.trainer.call("shift", amount=0.02)
        await run.sync()
        assert "has the checksum" in str(calls.error)
        await run.until_ready(2)
        expected = await run.expected()
        assert await run.served() == [expected, expected]
        spoiled.weights = WeightCalls(spoiled._http)

    run(body)


class DyingCalls(WeightCalls):
    """Calls to an engine whose process, or another one, is killed when the second bucket comes."""

    def __init__(self, client: EngineClient, pid: int) -> None:
        super().__init__(client._http)
        self._pid = pid
        self.num_copies = 0

    async def copy(self, bucket: Sequence[Any], handle: Mapping[str, Any], **options: Any) -> None:
        self.num_copies += 1
        if self.num_copies == 2:
            os.kill(self._pid, signal.SIGKILL)
        await super().copy(bucket, handle, **options)


class LateCalls(WeightCalls):
    """Calls to an engine that never come to copying; sets an event when they begin."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client._http)
        self.has_begun = asyncio.Event()

    async def copy(self, bucket: Sequence[Any], handle: Mapping[str, Any], **options: Any) -> None:
        self.has_begun.set()
        await asyncio.Event().wait()


def test_a_sync_that_is_cancelled_leaves_no_session_and_the_next_one_works(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        before = await run.served()
        client = run.pool.clients[0]
        client.weights = calls = LateCalls(client)
        await run.trainer.call("shift", amount=0.02)
        task = asyncio.create_task(run.sync())
        await calls.has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        client.weights = WeightCalls(client._http)
        assert await run.served() == before
        await check_no_session(run)
        await run.sync()
        assert await run.served() == [await run.expected()] * 2
        assert lent_by(run.trainer.pid) == []

    run(body)


async def check_no_session(run: WeightRun) -> None:
    for client in run.pool.clients:
        with pytest.raises(EngineRefused, match="no weight-update session"):
            await client.weights.discard(timeout_s=10)


def test_an_engine_that_is_killed_holds_up_nobody_and_leaves_nothing(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        dying = run.pool.clients[0]
        dying.weights = DyingCalls(dying, run.pool.pids[0] or 0)
        await run.trainer.call("shift", amount=0.02)
        await run.sync()
        expected = await run.expected()
        assert await run.served() == [expected]
        assert lent_by(run.trainer.pid) == []
        dying.weights = WeightCalls(dying._http)
        await run.until_ready(2)
        assert await run.served() == [expected, expected]

    run(body)


def test_a_trainer_that_is_killed_leaves_the_old_weights_and_nothing_else(run: Run) -> None:
    async def body(run: WeightRun) -> None:
        files = set(os.listdir("/dev/shm"))
        before, version = await run.served(), run.version
        client = run.pool.clients[0]
        client.weights = DyingCalls(client, run.trainer.pid or 0)
        await run.trainer.call("shift", amount=0.02)
        with pytest.raises(WorkerError):
            await run.sync()
        client.weights = WeightCalls(client._http)
        assert await run.served() == before
        assert (await answer(run)).versions == (version,)
        assert not any(borrowed_by(pid) for pid in run.pool.pids)
        ours = {name for name in os.listdir("/dev/shm") if name.startswith("rollmill-weights")}
        assert ours <= files
        await check_no_session(run)

    run(body)


class StagingTrainer:
    """The trainer's half of the contract, up to the first bucket."""

    def __init__(self) -> None:
        self.called: list[str] = []

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        self.called.append(method)
        if method != "stage_weights":
            return {}
        return {"stage": 1, "weights": [["a", "float32", [2]]], "num_bytes": 8}


def test_an_engine_that_cannot_is_told_with_a_fix_and_generation_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), ScriptedEngine(Script()) as engine:
            config = EngineConfig(urls=(engine.url,))
            async with EnginePool(config, model_path="none", run_dir=tmp_path) as pool:
                weights = WeightsConfig(transport="tensor", dir=str(tmp_path / "shared"))
                sync = TensorTransport(weights, tmp_path / "run", dtype="bfloat16")
                trainer = StagingTrainer()
                with pytest.raises(EngineRefused, match=r"0\.5\.23[\s\S]*transport to disk"):
                    await sync.sync(trainer, pool, 1)
                assert "lend_bucket" not in trainer.called
                assert not engine.is_paused

    asyncio.run(main())


def test_engines_elsewhere_are_refused_before_generation_is_held() -> None:
    check_engine(
        "http://gpu7:30000", ServerInfo(engine="rollmill-embedded", machine=machine_name())
    )
    check_engine("http://127.0.0.1:30000", ServerInfo(tp_size=4))
    elsewhere = {
        "http://127.0.0.1:30000": ServerInfo(engine="rollmill-embedded", machine="other/pid:[1]"),
        "http://192.0.2.1:30000": ServerInfo(),
        "http://localhost:30000": ServerInfo(nnodes=2),
    }
    for url, info in elsewhere.items():
        with pytest.raises(ConfigError, match=r"not on the trainer's machine[\s\S]*distributed"):
            check_engine(url, info)
    for layout in ({"pp_size": 2}, {"dp_size": 2}):
        with pytest.raises(ConfigError, match="in this layout"):
            check_engine("http://localhost:30000", ServerInfo(**layout))
