"""What the reward tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.config.reward import RewardConfig
from rollmill.rewards.judge import Judge
from rollmill.sample import Sample

HERE = Path(__file__).parent


def answer(response: str, label: Any = None, **fields: Any) -> Sample:
    return Sample([1, 2], response=response, label=label, **fields)


@pytest.fixture
def with_judge() -> Callable[..., Any]:
    """Run a coroutine function of a started judge: `with_judge(work, type="math")`."""

    def run(work: Callable[[Judge], Awaitable[Any]], **config: Any) -> Any:
        async def main() -> Any:
            async with Judge(RewardConfig(**config), seed=7, base_dir=HERE) as judge:
                return await work(judge)

        return asyncio.run(main())

    return run
