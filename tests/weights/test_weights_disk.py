from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from engine_script import Script
from scripted_engine import ScriptedEngine

from rollmill.config.engine import EngineConfig
from rollmill.config.weights import WeightsConfig
from rollmill.engine.pool import EnginePool
from rollmill.errors import EngineError, TrainerError
from rollmill.weights import folders as shared_folders
from rollmill.weights.disk import DiskTransport
from rollmill.weights.folders import WeightsNotWritten

LIMIT = {"max_new_tokens": 50}


class FolderTrainer:
    """The trainer's half of the contract: writes a folder when told to."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.error: Exception | None = None
        self.writes_nothing = False
        self.full: Path | None = None

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        assert method == "write_weights"
        assert arguments["dtype"] == "bfloat16"
        path = Path(arguments["path"])
        self.paths.append(path)
        if self.error is not None:
            raise self.error
        if self.full is not None and path.is_relative_to(self.full):
            (path / "model.safetensors").write_bytes(b"x")
            return {"error": "No space left on device"}
        if not self.writes_nothing:
            (path / "model.safetensors").write_bytes(b"x" * 10)
        return {"num_bytes": 10, "seconds": 0.0, "changed_share": None}


Body = Callable[[ScriptedEngine, EnginePool, FolderTrainer], Coroutine[Any, Any, None]]


def run(tmp_path: Path, body: Body, script: Script | None = None) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), ScriptedEngine(script or Script()) as engine:
            config = EngineConfig(urls=(engine.url,))
            async with EnginePool(config, model_path="none", run_dir=tmp_path) as pool:
                await body(engine, pool, FolderTrainer())

    asyncio.run(main())


def transport(tmp_path: Path, **config: Any) -> DiskTransport:
    settings = WeightsConfig(**({"dir": str(tmp_path / "shared")} | config))
    return DiskTransport(settings, tmp_path / "run", dtype="bfloat16")


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "shared").glob("*/*"))


def test_a_sync_pauses_flushes_updates_and_continues_in_this_order(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        metrics = await transport(tmp_path).sync(trainer, pool, 1)
        assert engine.events == ["pause:retract", "flush", "update:1", "continue"]
        assert metrics["weights/num_bytes"] == 10
        assert 0 <= metrics["weights/update_s"] <= metrics["weights/pause_s"]
        assert "weights/changed_share" not in metrics
        assert (await pool.generate("a", [5], LIMIT)).versions == (1,)

    run(tmp_path, body)


def test_in_place_keeps_the_cache(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        await transport(tmp_path, pause_mode="in_place").sync(trainer, pool, 1)
        assert engine.events == ["pause:in_place", "update:1", "continue"]

    run(tmp_path, body)


def test_only_the_served_version_stays_on_disk(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        sync = transport(tmp_path)
        for version in (1, 2, 3):
            await sync.sync(trainer, pool, version)
            assert folders(tmp_path) == [f"version_{version:08d}"]
        await sync.close()
        assert folders(tmp_path) == []

    run(tmp_path, body)


def test_a_failed_update_continues_keeps_the_old_weights_and_raises(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        sync = transport(tmp_path)
        await sync.sync(trainer, pool, 1)
        engine.fails_updates = True
        with pytest.raises(EngineError):
            await sync.sync(trainer, pool, 2)
        assert engine.events[-1] == "continue"
        assert folders(tmp_path) == ["version_00000001"]
        assert (await pool.generate("a", [5], LIMIT)).versions == (1,)
        engine.fails_updates = False
        await sync.sync(trainer, pool, 2)
        assert folders(tmp_path) == ["version_00000002"]

    run(tmp_path, body)


def test_a_trainer_that_cannot_write_never_pauses_the_engines(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        trainer.error = TrainerError("disk full")
        with pytest.raises(TrainerError, match="disk full"):
            await transport(tmp_path).sync(trainer, pool, 1)
        trainer.error = None
        trainer.writes_nothing = True
        with pytest.raises(TrainerError, match="wrote no weights"):
            await transport(tmp_path).sync(trainer, pool, 1)
        assert engine.events == []
        assert folders(tmp_path) == []

    run(tmp_path, body)


def test_the_same_version_can_be_sent_again(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        sync = transport(tmp_path)
        await sync.sync(trainer, pool, 1)
        await sync.sync(trainer, pool, 1)
        assert len(folders(tmp_path)) == 1
        assert len(set(trainer.paths)) == 2  # never into the folder that is served

    run(tmp_path, body)


def test_what_a_killed_run_left_is_removed_and_other_runs_are_left_alone(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        killed = transport(tmp_path)
        await killed.sync(trainer, pool, 1)
        settings = WeightsConfig(dir=str(tmp_path / "shared"))
        other = DiskTransport(settings, tmp_path / "other_run", dtype="bfloat16")
        await other.sync(trainer, pool, 7)
        await transport(tmp_path).sync(trainer, pool, 9)
        assert folders(tmp_path) == ["version_00000007", "version_00000009"]

    run(tmp_path, body)


def test_a_folder_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        sync = transport(tmp_path)
        await sync.sync(trainer, pool, 1)
        (folder,) = (tmp_path / "shared").iterdir()
        shutil.rmtree(folder)
        await sync.sync(trainer, pool, 2)
        assert folders(tmp_path) == ["version_00000002"]
        assert folder.stat().st_mode & 0o777 == 0o700

    run(tmp_path, body)


def test_the_folder_is_private_and_a_strangers_is_refused(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        await transport(tmp_path).sync(trainer, pool, 1)
        (folder,) = (tmp_path / "shared").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        elsewhere = tmp_path / "elsewhere"
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
        with pytest.raises(EngineError, match="belongs to somebody else"):
            await transport(tmp_path).sync(trainer, pool, 2)

    run(tmp_path, body)


def test_without_room_in_shared_memory_weights_go_to_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        settings = WeightsConfig()
        huge = DiskTransport(settings, tmp_path / "run", dtype="bfloat16", num_bytes=1 << 60)
        await huge.sync(trainer, pool, 1)
        assert trainer.paths[-1].is_relative_to(tmp_path / "run" / "weights")
        small = DiskTransport(settings, tmp_path / "run", dtype="bfloat16", num_bytes=10)
        monkeypatch.setattr(shared_folders, "SHARED_MEMORY", tmp_path / "shm")
        (tmp_path / "shm").mkdir()
        await small.sync(trainer, pool, 2)
        assert trainer.paths[-1].is_relative_to(tmp_path / "shm")

    run(tmp_path, body)


def test_a_start_removes_what_killed_runs_left_in_shared_memory_and_nothing_of_living_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", memory)
    left = memory / "rollmill-weights-0123456789abcdef"
    (left / "version_00000007").mkdir(parents=True)

    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        first, second = (
            DiskTransport(WeightsConfig(), tmp_path / name, dtype="bfloat16", num_bytes=10)
            for name in ("run_1", "run_2")
        )
        await first.sync(trainer, pool, 1)
        assert not left.exists()
        await second.sync(trainer, pool, 2)
        assert all((path / "model.safetensors").exists() for path in trainer.paths)
        await first.close()
        await second.close()
        assert list(memory.iterdir()) == []

    run(tmp_path, body)


def test_shared_memory_that_fills_up_sends_weights_to_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, weights = tmp_path / "shm", tmp_path / "run" / "weights"
    memory.mkdir()
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", memory)

    def versions(place: Path) -> list[str]:
        return sorted(path.name for path in place.glob("*/*"))

    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        sync = DiskTransport(WeightsConfig(), tmp_path / "run", dtype="bfloat16", num_bytes=10)
        await sync.sync(trainer, pool, 1)
        trainer.full = memory
        engine.fails_updates = True
        with pytest.raises(EngineError):
            await sync.sync(trainer, pool, 2)
        assert (versions(memory), versions(weights)) == (["version_00000001"], [])
        engine.fails_updates = False
        await sync.sync(trainer, pool, 2)
        await sync.sync(trainer, pool, 3)
        assert (versions(memory), versions(weights)) == ([], ["version_00000003"])
        assert [path.is_relative_to(memory) for path in trainer.paths] == [True, True, *[False] * 3]
        await sync.close()
        assert list(memory.iterdir()) == list(weights.iterdir()) == []

    run(tmp_path, body)


def test_a_full_folder_that_the_user_chose_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        trainer.full = tmp_path
        with pytest.raises(WeightsNotWritten, match=r"No space left[\s\S]*set weights\.dir"):
            await transport(tmp_path).sync(trainer, pool, 1)
        assert engine.events == []
        assert folders(tmp_path) == []

    run(tmp_path, body)


def test_a_sync_cancelled_in_mid_update_continues_generation(tmp_path: Path) -> None:
    async def body(engine: ScriptedEngine, pool: EnginePool, trainer: FolderTrainer) -> None:
        engine.hold()
        running = asyncio.create_task(pool.generate("a", [5], LIMIT))
        await engine.wait_for_running(1)
        task = asyncio.create_task(transport(tmp_path).sync(trainer, pool, 1))
        await engine.wait_until(lambda: engine.is_paused)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.release()
        assert not engine.is_paused
        assert not (await running).is_aborted

    run(tmp_path, body)


def test_engines_with_different_weights_under_one_version_are_found_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(20),
            ScriptedEngine(Script()) as first,
            ScriptedEngine(Script()) as second,
        ):
            config = EngineConfig(urls=(first.url, second.url))
            async with EnginePool(config, model_path="none", run_dir=tmp_path) as pool:
                sync = transport(tmp_path, verify_checksum=True)
                metrics = await sync.sync(FolderTrainer(), pool, 1)
                assert metrics["weights/verify_s"] >= 0
                second.checksum = "of something else"
                with pytest.raises(EngineError, match="different weights") as caught:
                    await sync.sync(FolderTrainer(), pool, 2)
                assert second.url in str(caught.value)

    asyncio.run(main())
