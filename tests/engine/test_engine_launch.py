from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import scripted_engine

from rollmill.config.engine import EngineConfig
from rollmill.engine.errors import EngineLost, EngineStartError
from rollmill.engine.http import new_session
from rollmill.engine.launch import EmbeddedProcess
from rollmill.engine.pool import EnginePool
from rollmill.engine.process import can_listen, free_port
from rollmill.engine.types import FinishReason

LIMIT = {"max_new_tokens": 50}
FAST = {"health_interval_s": 0.1, "health_timeout_s": 0.5, "start_timeout_s": 20.0}


def program(tmp_path: Path, **script: Any) -> tuple[str, ...]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))
    return (sys.executable, str(scripted_engine.__file__), "--script", str(path))


def process(tmp_path: Path, session: Any, command: tuple[str, ...], **config: Any) -> Any:
    return EmbeddedProcess(
        EngineConfig(**(FAST | config)),
        session,
        index=0,
        model_path="model",
        tokenizer_path="tokenizer",
        context_length=64,
        run_dir=tmp_path,
        program=command,
    )


def with_process(
    tmp_path: Path,
    command: tuple[str, ...],
    body: Callable[[EmbeddedProcess], Coroutine[Any, Any, None]],
    **config: Any,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), new_session() as session:
            engine = process(tmp_path, session, command, **config)
            try:
                await body(engine)
            finally:
                await engine.stop()

    asyncio.run(main())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_engine_starts_answers_and_is_gone_after_stop(tmp_path: Path) -> None:
    async def body(engine: EmbeddedProcess) -> None:
        await engine.start()
        pid = engine.pid
        assert pid is not None
        await engine.stop()
        assert not is_alive(pid)
        assert engine.pid is None
        assert "scripted engine on" in (tmp_path / "logs" / "engine_0.log").read_text()

    with_process(tmp_path, program(tmp_path), body)


def test_an_engine_that_ends_at_once_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such model: blue')")

    async def body(engine: EmbeddedProcess) -> None:
        with pytest.raises(EngineStartError, match="no such model: blue") as caught:
            await engine.start()
        assert "exit code 1" in str(caught.value)
        assert "engine_0.log" in str(caught.value)

    with_process(tmp_path, command, body)


def test_an_engine_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)")

    async def body(engine: EmbeddedProcess) -> None:
        with pytest.raises(EngineStartError, match=r"start_timeout_s = 0\.5"):
            await engine.start()
        assert engine.pid is None

    with_process(tmp_path, command, body, start_timeout_s=0.5)


def test_a_port_in_use_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        async def body(engine: EmbeddedProcess) -> None:
            with pytest.raises(EngineStartError, match=f"port {port} is in use") as caught:
                await engine.start()
            assert caught.value.where == "engine.port"
            assert caught.value.fix

        with_process(tmp_path, program(tmp_path), body, port=port)


def test_free_ports_can_be_listened_on() -> None:
    assert can_listen("127.0.0.1", free_port("127.0.0.1"))


def test_an_engine_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    driver = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
import test_engine_launch as t
from pathlib import Path
from rollmill.engine.http import new_session
async def main():
    async with new_session() as session:
        engine = t.process(Path({str(tmp_path)!r}), session, {program(tmp_path)!r})
        await engine.start()
        print(engine.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        gone = os.pidfd_open(pid)
        parent.kill()
    try:
        assert _wait_readable(gone, 10.0)
    finally:
        os.close(gone)


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_command_on_a_leash_is_killed_when_its_parent_dies() -> None:
    driver = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
leash = [sys.executable, "-m", "rollmill.engine.leash", *sleep]
child = subprocess.Popen(leash, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        gone = os.pidfd_open(pid)
        parent.kill()
    try:
        assert _wait_readable(gone, 10.0)
    finally:
        os.close(gone)


def test_a_leash_for_a_missing_command_says_so() -> None:
    command = [sys.executable, "-m", "rollmill.engine.leash", "/no/such/program"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/no/such/program: No such file" in done.stderr


def _wait_readable(descriptor: int, timeout_s: float) -> bool:
    import select

    return bool(select.select([descriptor], [], [], timeout_s)[0])


def test_the_pool_starts_engines_and_restarts_a_killed_one_with_current_weights(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        config = EngineConfig(num_engines=2, **FAST)
        pool = EnginePool(
            config, model_path="model", run_dir=tmp_path, program=program(tmp_path, token_s=0.01)
        )
        async with asyncio.timeout(60), pool:
            assert pool.expected_version == 0
            await pool.update_weights(str(tmp_path), 5)
            tasks = [asyncio.create_task(pool.generate(str(i), [5, 6, i], LIMIT)) for i in range(8)]
            await asyncio.wait(tasks, timeout=0.02)
            victim = pool._members[0]._process.pid  # type: ignore[union-attr]
            os.kill(victim, signal.SIGKILL)
            results = await asyncio.gather(*tasks)
            assert [result.finish for result in results] == [FinishReason.STOP] * 8
            assert {result.versions for result in results} == {(5,)}
            while pool.stats().num_ready < 2:
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0.02))])
            infos = [await client.model_info() for client in pool.clients]
            assert [info.weight_version for info in infos] == ["5", "5"]
            assert pool.stats().num_engine_deaths == 1
            pids = [member._process.pid for member in pool._members]  # type: ignore[union-attr]
        assert not any(is_alive(pid) for pid in pids)

    asyncio.run(main())


def test_when_every_engine_is_given_up_requests_fail_with_the_reasons(tmp_path: Path) -> None:
    async def main() -> None:
        config = EngineConfig(max_restarts=0, max_retries=5, **FAST)
        pool = EnginePool(
            config, model_path="model", run_dir=tmp_path, program=program(tmp_path, token_s=0.01)
        )
        async with asyncio.timeout(30), pool:
            task = asyncio.create_task(pool.generate("a", [5], LIMIT))
            os.kill(pool._members[0]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            with pytest.raises(EngineLost) as caught:
                await task
            assert "exit code -9" in str(caught.value)

    asyncio.run(main())


def test_a_start_that_fails_stops_the_engines_that_did_start(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port("127.0.0.1")
        with socket.socket() as other:
            other.bind(("127.0.0.1", port + 1))
            other.listen()
            config = EngineConfig(num_engines=2, port=port, **FAST)
            pool = EnginePool(
                config, model_path="model", run_dir=tmp_path, program=program(tmp_path)
            )
            with pytest.raises(EngineStartError, match=f"port {port + 1} is in use"):
                await pool.start()
        assert can_listen("127.0.0.1", port)

    asyncio.run(main())
