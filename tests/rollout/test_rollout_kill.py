"""`kill -9` at random moments: afterwards everything was trained that would have been, once.

ROLLMILL_NUM_KILLS=50 kills more often (and `-s` says how often a living run was hit).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_script import Fault, Script
from killed_run import NUM_STEPS
from scripted_engine import ScriptedEngine

from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report

NUM_KILLS = int(os.environ.get("ROLLMILL_NUM_KILLS", "4"))
KILLS_PER_RUN = 4
BATCH = 4
SCRIPT = Path(__file__).with_name("killed_run.py")
FAULTS = {"serial": (), "concurrent": (Fault("http", rate=0.05), Fault("cut", rate=0.03))}


@contextmanager
def engine(variant: str) -> Iterator[str]:
    """A scripted engine in a thread of its own: it outlives the runs that are killed."""
    script = Script(seed=1, length=20, token_s=0.0008, faults=FAULTS[variant])
    loop = asyncio.new_event_loop()
    server = ScriptedEngine(script)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def start(root: Path, url: str, variant: str) -> subprocess.Popen[bytes]:
    root.mkdir(parents=True, exist_ok=True)
    with (root / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), str(root), url, variant],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def kill_after(seconds: float, root: Path, url: str, variant: str) -> bool:
    """Start a run and kill it; False when it had ended before."""
    process = start(root, url, variant)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL
    return False


def finish(root: Path, url: str, variant: str) -> None:
    process = start(root, url, variant)
    try:
        code = process.wait(120)
    finally:
        process.kill()
    assert code == 0, (root / "driver.log").read_text()[-3000:]


def trained(root: Path) -> list[tuple[int, int, int]]:
    """What the surviving line of training was given, from the trainer's own last checkpoint."""
    (newest,) = sorted((root / "checkpoints").glob(f"*{NUM_STEPS}"))
    return [tuple(entry) for entry in json.loads((newest / "trainer/trained.json").read_text())]


def check_books(root: Path, given: list[tuple[int, int, int]]) -> None:
    report = read_report(root / "ledger.sqlite")
    assert report.balance[State.CONSUMED] == len({group for group, _, _ in given})
    assert report.num_consumed_by_step == dict.fromkeys(range(1, NUM_STEPS + 1), BATCH)
    assert report.balance[State.IN_FLIGHT] == 0


@pytest.mark.timeout(120 + 60 * NUM_KILLS)
@pytest.mark.parametrize("variant", ["serial", "concurrent"])
def test_a_killed_run_trains_what_the_undisturbed_one_does_and_nothing_twice(
    tmp_path: Path, variant: str
) -> None:
    draw = random.Random(f"{variant} {NUM_KILLS}")
    with engine(variant) as url:
        began = time.monotonic()
        finish(tmp_path / "undisturbed", url, variant)
        duration_s = time.monotonic() - began
        expected = trained(tmp_path / "undisturbed")
        assert len(expected) == NUM_STEPS * BATCH * 2
        check_books(tmp_path / "undisturbed", expected)
        num_killed = num_runs = 0
        while num_killed < NUM_KILLS // 2:
            root = tmp_path / f"killed_{num_runs}"
            num_runs += 1
            for _ in range(min(KILLS_PER_RUN, NUM_KILLS // 2 - num_killed)):
                is_killed = kill_after(draw.uniform(0.3, 0.8) * duration_s, root, url, variant)
                num_killed += is_killed
                if not is_killed:  # it was faster: the machine is less busy than it was
                    duration_s *= 0.8
                    break
            finish(root, url, variant)
            given = trained(root)
            assert max(Counter(given).values()) == 1
            assert set(given) == set(expected)
            check_books(root, given)
        print(f"{variant}: killed {num_killed} times, in {num_runs} runs")
