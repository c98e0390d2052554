"""The engine under test: the embedded engine with a tiny random model, or any server by URL.

To run the suite against another engine (SGLang, say), start it and set

    ROLLMILL_CONFORMANCE_URL     its base URL
    ROLLMILL_CONFORMANCE_MODEL   the model folder it serves, as it sees it
    ROLLMILL_CONFORMANCE_TOLERANCE   largest log-prob difference between two ways of computing
                                     it (default 1e-4; bf16 needs about 0.1)

The server should be idle, hold one model with a vocabulary of 64 or more, and have a context of
1024 or more. Its weights are replaced by themselves under new version numbers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from random_model import write_random_model

from rollmill.config.engine import EmbeddedEngineConfig, EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.http import new_session
from rollmill.engine.launch import EmbeddedProcess

CONFIG = EngineConfig(
    start_timeout_s=120,
    request_timeout_s=60,
    embedded=EmbeddedEngineConfig(num_threads=1, device="cpu"),
)


@dataclass(frozen=True)
class Target:
    """The engine under test."""

    url: str
    model: str
    other_model: str | None  # other weights of the same shape; None for an engine by URL
    tolerance: float

    @property
    def is_embedded(self) -> bool:
        return self.other_model is not None


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    url = os.environ.get("ROLLMILL_CONFORMANCE_URL")
    if url is not None:
        tolerance = float(os.environ.get("ROLLMILL_CONFORMANCE_TOLERANCE", "1e-4"))
        yield Target(url.rstrip("/"), os.environ["ROLLMILL_CONFORMANCE_MODEL"], None, tolerance)
        return
    folder = tmp_path_factory.mktemp("conformance")
    model, other = write_random_model(folder / "a", 0), write_random_model(folder / "b", 1)
    with asyncio.Runner() as runner:
        process = runner.run(_start(model, folder))
        try:
            yield Target(process.url, model, other, 1e-4)
        finally:
            runner.run(process.stop())


async def _start(model: str, folder: Path) -> EmbeddedProcess:
    async with new_session() as session:
        process = EmbeddedProcess(
            CONFIG,
            session,
            index=0,
            model_path=model,
            tokenizer_path=None,
            context_length=1024,
            run_dir=folder,
        )
        await process.start()
        return process


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[EngineClient]:
    async with new_session() as session:
        client = EngineClient(target.url, CONFIG, session)
        try:
            yield client
        finally:
            await client.close()


Run = Callable[[Callable[[EngineClient], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(target: Target) -> Run:
    """Runs a test's body with a client; afterwards the engine is idle and serves its first
    weights again."""

    def runner(body: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(100), connected(target) as client:
                try:
                    await body(client)
                finally:
                    await client.resume()
                    await client.abort_all()
                    await client.flush_cache(wait_s=60)

        asyncio.run(main())

    return runner
