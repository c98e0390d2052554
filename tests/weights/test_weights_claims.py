"""Folders that are claimed stay; those of processes that are gone do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollmill.weights.claims import Claim, remove_if_unclaimed, remove_unclaimed

OWNER = """
import sys
from pathlib import Path
from rollmill.weights.claims import Claim
Claim(Path(sys.argv[1])).hold()
print("held", flush=True)
sys.stdin.read()
"""


def folder_in(place: Path, digit: str = "a") -> Path:
    return place / f"rollmill-weights-{digit * 16}"


def test_the_folder_of_a_process_stays_until_it_is_killed(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], **pipes) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        (folder / "version_00000001").mkdir()
        remove_unclaimed(tmp_path)
        assert (folder / "version_00000001").is_dir()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        remove_unclaimed(tmp_path)
    assert not folder.exists()


def test_only_folders_of_runs_are_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder_in(tmp_path, "b").symlink_to(elsewhere)
    folder_in(tmp_path, "c").write_text("a file")
    (tmp_path / "rollmill-weights-mine").mkdir()
    before = sorted(tmp_path.iterdir())
    remove_unclaimed(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    remove_unclaimed(tmp_path / "missing")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_folders_of_other_users_stay_and_cannot_be_claimed(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    remove_unclaimed(tmp_path)
    assert folder.is_dir()
    with pytest.raises(PermissionError):
        Claim(folder).hold()


def test_a_claim_is_renewed_when_its_folder_was_removed(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    claim = Claim(folder)
    claim.hold()
    folder.rmdir()
    claim.hold()
    assert not remove_if_unclaimed(folder)
    claim.release()
    assert remove_if_unclaimed(folder)


def test_several_may_claim_a_folder(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    first, second = Claim(folder), Claim(folder)
    first.hold()
    second.hold()
    first.release()
    assert not remove_if_unclaimed(folder)
    second.release()
    assert remove_if_unclaimed(folder)


def test_a_folder_that_was_claimed_is_never_removed_by_others_who_start(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)

    def start(number: int) -> bool:
        claim = Claim(folder)
        claim.hold()
        mine = folder / str(number)
        mine.touch()
        remove_unclaimed(tmp_path)
        is_there = mine.exists()
        claim.release()
        remove_unclaimed(tmp_path)
        return is_there

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(start, range(400)))
    assert not folder.exists()
