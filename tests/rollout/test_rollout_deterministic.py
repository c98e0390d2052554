"""Same run, same tokens on the embedded engine, whatever the concurrency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_model import write_random_model
from rollout_helpers import make_side, make_source, run

from rollmill.config.engine import EngineConfig
from rollmill.engine.pool import EnginePool
from rollmill.sample import flatten


def source_of(num_prompts: int) -> Any:
    """Prompts whose tokens the random model knows."""
    source = make_source(num_prompts, 4)
    for row in source.dataset.parts[0].rows:
        object.__setattr__(row, "prompt_tokens", row.prompt_tokens % 50 + 2)
    return source


@pytest.mark.timeout(200)
def test_concurrency_does_not_change_a_token(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", seed=0)
    config = EngineConfig(embedded={"num_threads": 1, "max_running_requests": 64})

    async def tokens(pool: EnginePool, max_requests: int, name: str) -> list[Any]:
        side = make_side(
            tmp_path / name,
            pool,
            source=source_of(32),
            max_requests=max_requests,
            max_new_tokens=12,
            config={"batch_size": 4, "n_samples_per_prompt": 4},
        )
        batches = [await side.train(0) for _ in range(2)]
        side.ledger.close()
        return [
            (s.group_index, s.attempt, s.tokens.tolist())
            for batch in batches
            for s in flatten(batch.groups)
        ]

    async def main() -> None:
        async with EnginePool(config, model_path=model, run_dir=tmp_path) as pool:
            one = await tokens(pool, 1, "one")
            many = await tokens(pool, 64, "many")
            again = await tokens(pool, 64, "again")
        assert len({tuple(t) for _, _, t in one}) > 16  # answers differ between samples
        assert one == many == again

    run(main, limit_s=180)
