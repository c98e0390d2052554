"""Whose turn it is when engines and trainer share memory, and syncs under which engines die."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from engine_script import Script
from scripted_engine import ScriptedEngine

from rollmill.config import Config
from rollmill.config.load import parse_config
from rollmill.engine.errors import EngineUnreachable
from rollmill.engine.pool import EnginePool
from rollmill.loop.sync import NUM_TRIES, WeightSync
from rollmill.weights import open_transport


class Trainer:
    """Stands in for the trainer's process: notes its calls among the engine's events."""

    pid = None

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.before_write: Callable[[int], Awaitable[None]] | None = None
        self.num_writes = 0

    async def start(self, **_: Any) -> None:
        """It runs."""

    async def stop(self, grace_s: float = 5.0) -> None:
        """It has no process."""

    async def call(self, method: str, /, **arguments: Any) -> Any:
        self.events.append(f"trainer:{method}")
        if method != "write_weights":
            return None
        self.num_writes += 1
        if self.before_write is not None:
            await self.before_write(self.num_writes)
        Path(arguments["path"], "model.safetensors").write_bytes(b"made up")
        return {"num_bytes": 7}


def config_for(engine: ScriptedEngine, folder: Path, **changes: Any) -> Config:
    return parse_config(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"},
            "engine": {
                "urls": [engine.url],
                "health_interval_s": 0.1,
                "health_timeout_s": 0.5,
                "max_retries": 0,
                **changes,
            },
            "weights": {"dir": str(folder / "weights"), "verify_checksum": False},
        }
    )


def with_sync(
    folder: Path,
    body: Callable[[WeightSync, ScriptedEngine, Trainer], Awaitable[None]],
    **engine: Any,
) -> None:
    async def main() -> None:
        async with ScriptedEngine(Script()) as server:
            config = config_for(server, folder, **engine)
            async with EnginePool(config.engine, model_path="none", run_dir=folder) as pool:
                transport = open_transport(config, folder)
                trainer = Trainer(server.events)
                sync = WeightSync(config, trainer=trainer, engines=pool, transport=transport)
                await body(sync, server, trainer)
                await transport.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_colocated_engines_and_trainer_take_turns(tmp_path: Path) -> None:
    async def body(sync: WeightSync, server: ScriptedEngine, _: Trainer) -> None:
        await sync.bring(0)
        await sync.make_room_for_trainer()
        server.events.append("train")
        await sync.bring(1)
        told = ("trainer:o", "train", "release", "resume", "update")
        assert [event for event in server.events if event.startswith(told)] == [
            "trainer:offload",
            "trainer:write_weights",
            "update:0",
            "release:kv_cache,weights",
            "trainer:onload",
            "train",
            "trainer:offload",
            "resume:weights",
            "trainer:write_weights",
            "update:1",
            "resume:kv_cache",
        ]

    with_sync(tmp_path, body, offload=True)


def test_apart_nobody_gives_memory_back(tmp_path: Path) -> None:
    async def body(sync: WeightSync, server: ScriptedEngine, _: Trainer) -> None:
        await sync.bring(0)
        await sync.make_room_for_trainer()
        await sync.bring(1)
        told = ("trainer:o", "release", "resume")
        assert not [event for event in server.events if event.startswith(told)]
        assert (sync.version, server.version) == (1, "1")

    with_sync(tmp_path, body)


def test_a_sync_whose_engine_dies_is_made_again(tmp_path: Path) -> None:
    async def body(sync: WeightSync, server: ScriptedEngine, trainer: Trainer) -> None:
        async def dies_once(number: int) -> None:
            await (server.stop() if number == 1 else server.start())

        await sync.bring(0)
        trainer.num_writes, trainer.before_write = 0, dies_once
        await sync.bring(1)
        assert trainer.num_writes == 2
        assert sync.version == 1
        await server.wait_until(lambda: server.version == "1")

    with_sync(tmp_path, body)


def test_a_sync_that_fails_again_and_again_ends_with_the_reason(tmp_path: Path) -> None:
    async def body(sync: WeightSync, server: ScriptedEngine, trainer: Trainer) -> None:
        await server.stop()
        with pytest.raises(EngineUnreachable):
            await sync.bring(0)
        assert trainer.num_writes == NUM_TRIES
        assert sync.version == -1

    with_sync(tmp_path, body, health_strikes=1000)
