"""Several processes as one: together or not at all."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollmill.cluster.ranks import RankGroup
from rollmill.errors import DataError, WorkerError

MODULE = """
import os, threading
from rollmill.errors import DataError

class Member:
    def __init__(self, *, start, rank, num_ranks, rendezvous):
        if start < 0:
            raise DataError("a bad start", found=str(start))
        self.rank, self.num_ranks, self.total = rank, num_ranks, start
        self.place = rendezvous
    def add(self, *, amount):
        self.total += amount
        return {"rank": self.rank, "of": self.num_ranks, "total": self.total, "at": self.place}
    def all_raise(self):
        raise DataError("bad row", where="a.jsonl:3")
    def one_raises(self, *, which):
        if self.rank == which:
            raise DataError("only here", where=f"rank {which}")
        threading.Event().wait()
    def one_dies(self, *, which):
        if self.rank == which:
            print("last words", flush=True)
            os._exit(7)
        threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "member_for_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def run(
    tmp_path: Path, scenario: Callable[[RankGroup], Awaitable[None]], *, grace_s: float = 60
) -> None:
    async def main() -> None:
        group = RankGroup(
            "member_for_test:Member",
            name="trainer",
            num_ranks=3,
            log_path=tmp_path / "logs" / "trainer.log",
            grace_s=grace_s,
        )
        try:
            await scenario(group)
        finally:
            await group.stop()
        assert group.pids == [None, None, None]

    asyncio.run(main())


def test_every_rank_is_called_and_the_first_one_answers(tmp_path: Path) -> None:
    async def scenario(group: RankGroup) -> None:
        await group.start(start=1)
        first = await group.call("add", amount=2)
        assert (first["rank"], first["of"], first["total"]) == (0, 3, 3)
        assert first["at"].startswith("file://")
        assert len({*group.pids}) == 3
        assert None not in group.pids
        logs = {path.name for path in (tmp_path / "logs").iterdir()}
        assert logs == {"trainer.log", "trainer_rank1.log", "trainer_rank2.log"}

    run(tmp_path, scenario)


def test_a_mistake_on_every_rank_leaves_the_group_usable(tmp_path: Path) -> None:
    async def scenario(group: RankGroup) -> None:
        await group.start(start=0)
        with pytest.raises(DataError, match=r"bad row"):
            await group.call("all_raise")
        assert (await group.call("add", amount=5))["total"] == 5

    run(tmp_path, scenario)


def test_a_bad_start_is_the_members_own_error(tmp_path: Path) -> None:
    async def scenario(group: RankGroup) -> None:
        with pytest.raises(DataError, match=r"a bad start"):
            await group.start(start=-1)

    run(tmp_path, scenario)


def test_a_rank_that_fails_alone_ends_the_others(tmp_path: Path) -> None:
    async def scenario(group: RankGroup) -> None:
        await group.start(start=0)
        with pytest.raises(DataError, match=r"only here"):
            await group.call("one_raises", which=1)
        assert group.pids == [None, None, None]
        with pytest.raises(WorkerError, match=r"only here"):
            await group.call("add", amount=1)

    run(tmp_path, scenario, grace_s=0.2)


@pytest.mark.parametrize("which", [0, 2])
def test_a_rank_that_dies_in_a_call_ends_the_others_and_shows_its_log(
    tmp_path: Path, which: int
) -> None:
    async def scenario(group: RankGroup) -> None:
        await group.start(start=0)
        with pytest.raises(WorkerError, match=rf"rank {which} of 3") as caught:
            await group.call("one_dies", which=which)
        assert "last words" in str(caught.value)
        assert "exit code 7" in str(caught.value)
        assert group.pids == [None, None, None]

    run(tmp_path, scenario)


def test_a_rank_that_is_killed_between_calls_ends_the_others(tmp_path: Path) -> None:
    async def scenario(group: RankGroup) -> None:
        await group.start(start=0)
        victim = group.pids[1]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rank 1 of 3") as caught:
            await group.call("one_raises", which=1)
        assert "SIGKILL" in str(caught.value)
        assert group.pids == [None, None, None]

    run(tmp_path, scenario)


DRIVER = """
import asyncio, sys
from pathlib import Path
from rollmill.cluster.ranks import RankGroup
async def main():
    group = RankGroup(
        "member_for_test:Member", name="trainer", num_ranks=2, log_path=Path(sys.argv[1])
    )
    await group.start(start=0)
    print(*group.pids, flush=True)
    await group.call("one_raises", which=9)
asyncio.run(main())
"""


def test_no_rank_outlives_a_killed_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "trainer.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        ranks = [os.pidfd_open(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(ranks) == 2
        driver.kill()
    for rank in ranks:
        ended, _, _ = select.select([rank], [], [], 20)
        os.close(rank)
        assert ended, "a rank outlived its driver"
