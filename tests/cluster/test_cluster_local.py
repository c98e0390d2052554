import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rollmill.cluster.local import LocalWorker
from rollmill.errors import DataError, WorkerError

MODULE = """
import os, time
from rollmill.errors import DataError

class Thing:
    def __init__(self, *, start):
        self.total = start
    def add(self, *, amount):
        self.total += amount
        return {"total": self.total, "raw": b"\\x00\\xff"}
    def ours(self):
        raise DataError("bad row", where="a.jsonl:3", fix="mend it")
    def theirs(self):
        return 1 / 0
    def die(self):
        print("last words", flush=True)
        os._exit(7)
    def sleep(self, *, seconds):
        time.sleep(seconds)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "thing_for_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def worker(tmp_path: Path) -> LocalWorker:
    return LocalWorker("thing_for_test:Thing", name="thing", log_path=tmp_path / "logs/thing.log")


def test_calls_keep_state_and_carry_bytes(module: Path) -> None:
    async def scenario() -> None:
        thing = worker(module)
        await thing.start(start=1)
        first, second = await asyncio.gather(
            thing.call("add", amount=2), thing.call("add", amount=10)
        )
        assert (first["total"], second["total"]) == (3, 13)
        assert first["raw"] == b"\x00\xff"
        await thing.stop()
        assert thing.pid is None

    asyncio.run(scenario())


def test_an_error_of_ours_arrives_as_the_same_kind_with_its_parts(module: Path) -> None:
    async def scenario() -> None:
        thing = worker(module)
        await thing.start(start=0)
        with pytest.raises(DataError) as caught:
            await thing.call("ours")
        assert (caught.value.where, caught.value.fix) == ("a.jsonl:3", "mend it")
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            await thing.call("theirs")
        assert (await thing.call("add", amount=1))["total"] == 1
        await thing.stop()

    asyncio.run(scenario())


def test_a_worker_leaves_signals_that_ask_to_end_to_the_driver(module: Path) -> None:
    async def scenario() -> None:
        thing = worker(module)
        await thing.start(start=1)
        assert thing.pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(thing.pid, number)
        assert (await thing.call("add", amount=1))["total"] == 2
        await thing.stop()
        assert thing.pid is None

    asyncio.run(scenario())


def test_a_dead_worker_says_how_it_died_and_shows_its_log(module: Path) -> None:
    async def scenario() -> None:
        thing = worker(module)
        await thing.start(start=0)
        with pytest.raises(WorkerError) as caught:
            await thing.call("die")
        assert "last words" in str(caught.value)
        with pytest.raises(WorkerError, match="exit code 7"):
            await thing.call("add", amount=1)
        await thing.stop()

    asyncio.run(scenario())


def test_stop_ends_a_worker_that_is_busy(module: Path) -> None:
    async def scenario() -> None:
        thing = worker(module)
        await thing.start(start=0)
        busy = asyncio.create_task(thing.call("sleep", seconds=600))
        await asyncio.sleep(0)
        await thing.stop()
        assert thing.pid is None
        with pytest.raises(WorkerError):
            await busy

    asyncio.run(scenario())


def test_the_worker_dies_with_a_killed_driver(module: Path) -> None:
    driver = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from rollmill.cluster.local import LocalWorker
        async def main():
            log = Path({str(module)!r}) / "t.log"
            thing = LocalWorker("thing_for_test:Thing", name="thing", log_path=log)
            await thing.start(start=0)
            print(thing.pid, flush=True)
            await thing.call("sleep", seconds=600)
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{pid}").exists(), "the worker outlived its driver"


def test_a_driver_killed_with_replies_unread_ends_the_worker_too() -> None:
    script = textwrap.dedent("""
        import queue, socket
        from rollmill.cluster.worker import _watch
        driver, worker = socket.socketpair()
        worker.sendall(b"a reply that nobody reads")
        driver.close()  # the worker's next read is a reset, not an end
        _watch(worker, queue.SimpleQueue())
        raise SystemExit("the watch came back")
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_calls_that_cannot_be_read_end_the_worker_as_failed() -> None:
    script = textwrap.dedent("""
        import queue, socket
        from rollmill.cluster.worker import LENGTH, _watch
        driver, worker = socket.socketpair()
        driver.sendall(LENGTH.pack(3) + b"???")
        _watch(worker, queue.SimpleQueue())
        raise SystemExit("the watch came back")
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert b"the driver's calls cannot be read any more" in ended.stderr
