"""A staleness bound of 0 is synchronous training, step by step and token by token."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import make_side, make_source, run

from rollmill.sample import Group
from rollmill.testing import FakeEngines
from rollmill.testing.fakes import FakeCall

BATCH, N, STEPS = 3, 2, 5


class VersionedEngines(FakeEngines):
    """Answers depend on the weights that write them, and take unequal times."""

    async def generate(self, rid: str, input_ids: Any, sampling: Any, **options: Any) -> Any:
        for _ in range(sampling["sampling_seed"] % 7):
            await asyncio.sleep(0)
        seed = sampling["sampling_seed"] + 1000 * self.version
        return await super().generate(rid, input_ids, sampling | {"sampling_seed": seed}, **options)


def length_of(call: FakeCall) -> int:
    return 2 + call.sampling["sampling_seed"] % 9


def contents(groups: list[Group]) -> list[tuple[Any, ...]]:
    return [
        (s.group_index, s.attempt, s.tokens.tolist(), s.weight_versions.tolist(), s.reward)
        for group in groups
        for s in group.samples
    ]


def plain_definition(folder: Path) -> list[list[tuple[Any, ...]]]:
    """Step k: the next B prompts, answered by the weights of k - 1 training steps, all of them."""
    engines = VersionedEngines(length_of)
    side = make_side(folder, engines, config={"batch_size": BATCH})
    runner = side.manager._parts.runner
    source = make_source(64, N)

    async def main() -> list[list[tuple[Any, ...]]]:
        batches = []
        for step in range(1, STEPS + 1):
            engines.version = step - 1
            at_step = runner.at_step(step)
            groups = [await at_step.run(group) for group in source.take(BATCH)]
            batches.append(contents(groups))
        return batches

    return run(main)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_step_trains_on_the_plain_definitions_batch(
    tmp_path: Path, asynchronous: bool
) -> None:
    (tmp_path / "plain").mkdir()
    expected = plain_definition(tmp_path / "plain")
    engines = VersionedEngines(length_of)
    config = {"batch_size": BATCH, "asynchronous": asynchronous, "max_staleness": 0}
    side = make_side(tmp_path, engines, config=config)

    async def main() -> list[list[tuple[Any, ...]]]:
        batches = []
        for step in range(1, STEPS + 1):
            batch = await side.train()
            assert batch.metrics["rollout/staleness_max"] == 0
            batches.append(contents(batch.groups))
            for _ in range(step):
                await asyncio.sleep(0)  # the trainer works; nothing may be written ahead
            engines.version = step
            side.manager.weights_changed(step)
        await side.manager.close()
        return batches

    found = run(main)

    assert found == expected
    assert len({str(batch) for batch in found}) == STEPS
    side.check_books()
