"""`kill -9` at random moments: afterwards everything was trained that would have been, once.

Set ROLLMILL_NUM_KILLS to kill more often (`make kill-test` does, 50 times).
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


def finish(root: Path, url: str, variant: str) -> None:
    process = start(root, url, variant)
    assert process.wait(120) == 0, (root / "driver.log").read_text()[-3000:]


def trained(root: Path) -> list[tuple[int, int, int]]:
    """What the surviving line of training was given, from the trainer's own last checkpoint."""
    (newest,) = sorted((root / "checkpoints").glob(f"*{NUM_STEPS}"))
    return [tuple(entry) for entry in json.loads((newest / "trainer/trained.json").read_text())]


def check_books(root: Path, given: list[tuple[int, int, int]]) -> None:
    report = read_report(root / "ledger.sqlite")
    assert report.balance[State.CONSUMED] == len({group for group, _, _ in given})
    assert report.num_consumed_by_step == dict.fromkeys(range(1, NUM_STEPS + 1), BATCH)
    assert report.balance[State.IN_FLIGHT] == 0


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
        left, num_killed = NUM_KILLS // 2, 0
        while left:
            root = tmp_path / f"killed_{left}"
            kills = min(left, KILLS_PER_RUN)
            for _ in range(kills):
                process = start(root, url, variant)
                try:
                    process.wait(draw.uniform(0.3, 0.95) * duration_s)
                except subprocess.TimeoutExpired:
                    num_killed += 1
                process.send_signal(signal.SIGKILL)
                process.wait()
            finish(root, url, variant)
            given = trained(root)
            assert max(Counter(given).values()) == 1
            assert set(given) == set(expected)
            check_books(root, given)
            left -= kills
        print(f"{variant}: {num_killed} of {NUM_KILLS // 2} kills hit a living run")
        assert num_killed > NUM_KILLS // 4
