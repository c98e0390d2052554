"""Checkpoints are whole or not there."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from rollmill.errors import CheckpointError
from rollmill.trainer.checkpoint import FORMAT_VERSION, MANIFEST, CheckpointStore


def write(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    folder = store.begin(step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "model.bin").write_text(f"{text} {step}")
    (folder / "ledger.bin").write_bytes(bytes([step]))
    return store.commit(step, {"weight_version": step * 10})


def test_the_newest_checkpoint_comes_back_with_its_info(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    assert store.latest() is None
    write(store, 1)
    path = write(store, 2)
    found = store.latest()
    assert found is not None
    assert (found.step, found.path, found.info) == (2, path, {"weight_version": 20})
    assert (path / "trainer" / "model.bin").read_text() == "weights 2"


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        write(store, step)
    assert store.steps() == [3, 10]


def test_a_damaged_later_checkpoint_never_pushes_out_a_whole_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 4)
    damage_bit(write(store, 6))
    write(CheckpointStore(tmp_path, keep=1), 5)  # a run that went on from before it
    assert store.steps() == [5]
    assert store.latest().step == 5  # type: ignore[union-attr]


def test_every_byte_of_a_checkpoint_is_checked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    path = write(store, 2)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        for position in range(len(whole)):
            flipped = bytes([whole[position] ^ 1])
            for torn in (whole[:position], whole[:position] + flipped + whole[position + 1 :]):
                file.write_bytes(torn)
                found = store.latest()
                assert found is not None
                assert found.step == 1, (file.name, position, torn)
        file.write_bytes(whole)
    assert store.latest().step == 2  # type: ignore[union-attr]


def test_an_uncommitted_checkpoint_is_invisible_and_cleaned_up(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    (store.begin(2) / "half").write_text("written")
    assert store.steps() == [1]
    reopened = CheckpointStore(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert reopened.latest().step == 1  # type: ignore[union-attr]


def damage_bit(path: Path) -> None:
    file = path / "trainer" / "model.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def truncate(path: Path) -> None:
    (path / "trainer" / "model.bin").write_bytes(b"w")


def remove_file(path: Path) -> None:
    (path / "ledger.bin").unlink()


def remove_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def tear_manifest(path: Path) -> None:
    (path / MANIFEST).write_text((path / MANIFEST).read_text()[:30])


def rename_manifest(path: Path) -> None:
    shutil.copyfile(path.parent / "step_000001" / MANIFEST, path / MANIFEST)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_bit, "checksum"),
        (truncate, "1 bytes instead of 9"),
        (remove_file, "missing"),
        (remove_manifest, "no usable manifest"),
        (tear_manifest, "no usable manifest"),
        (rename_manifest, "another step"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, reason: str
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    write(store, 1)
    damage(write(store, 2))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None
    assert found.step == 1
    assert "step_000002" in caplog.text
    assert reason in caplog.text


def test_when_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        damage_bit(write(store, step))
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        store.latest()


def test_a_checkpoint_of_another_version_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    manifest = write(store, 1) / MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT_VERSION}', '"format": 99'))
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    assert f"format 99, and this version of rollmill reads {FORMAT_VERSION}" in str(caught.value)
    assert "the version of rollmill that wrote them" in str(caught.value.fix)


def test_a_step_can_be_committed_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1, "old")
    path = write(store, 1, "new")
    assert (path / "trainer" / "model.bin").read_text() == "new 1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000001"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1).rename(tmp_path / ".replaced-step_000001")
    assert CheckpointStore(tmp_path, keep=2).latest().step == 1  # type: ignore[union-attr]


def test_commit_without_begin_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to commit"):
        CheckpointStore(tmp_path, keep=1).commit(5, {})
