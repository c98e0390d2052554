"""A student, a teacher, their engines and answers that were recorded once for all tests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from distill_helpers import ENGINE, World, config_of, prepare_now

from rollmill.engine.http import new_session
from rollmill.engine.launch import EmbeddedProcess
from support.tiny import make_tiny_model, warm_start, write_task_files


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two engines that run already. The teacher is the student, trained on."""
    root = tmp_path_factory.mktemp("distill")
    student = make_tiny_model(root / "student", 0, hidden_size=64, layers=2)
    warm_start(student, 0, steps=150)
    teacher = Path(shutil.copytree(student, root / "teacher"))
    warm_start(teacher, 5, steps=30)
    files = write_task_files(root / "task", num_train=256, num_eval=64)
    with asyncio.Runner() as runner:
        engines = runner.run(_start([student, teacher], root))
        try:
            yield World(root, student, teacher, files, engines[0].url, engines[1].url)
        finally:
            for engine in engines:
                runner.run(engine.stop())


async def _start(models: list[Path], root: Path) -> list[EmbeddedProcess]:
    async with new_session() as session:
        engines = [
            EmbeddedProcess(
                ENGINE,
                session,
                index=number,
                model_path=str(model),
                tokenizer_path=None,
                context_length=None,
                run_dir=root,
            )
            for number, model in enumerate(models)
        ]
        await asyncio.gather(*(engine.start() for engine in engines))
    return engines


@pytest.fixture(scope="session")
def prepared(world: World) -> Path:
    """48 prompts with two answers each, in three shards. Copy before changing anything."""
    folder = world.root / "prepared"
    prepare_now(world, config_of(world, opd__data=str(folder)))
    return folder


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """The recorded answers, to be spoilt."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))
