"""Rollouts that go on while the trainer trains: bound, books and resume."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_helpers import Side, make_side, make_source, run, until

from rollmill.data.ledger import State
from rollmill.errors import HookError, RolloutError
from rollmill.rollout.batch import RolloutBatch
from rollmill.rollout.hooks import LoadedHooks
from rollmill.sample import Group
from rollmill.sample_codec import decode_group
from rollmill.testing import FakeEngines

BATCH = 3


class UnevenEngines(FakeEngines):
    """Answers take a random number of turns of the event loop."""

    def __init__(self, seed: int) -> None:
        super().__init__(length=4)
        self._rng = random.Random(seed)

    async def generate(self, rid: str, input_ids: Any, sampling: Any, **options: Any) -> Any:
        version = self.version
        for _ in range(int(self._rng.lognormvariate(1.5, 1.2))):
            await asyncio.sleep(0)
        result = await super().generate(rid, input_ids, sampling, **options)
        assert all(span.version >= version for span in result.spans)
        return result


def stream_side(folder: Path, engines: FakeEngines, staleness: int, **options: Any) -> Side:
    config = {"batch_size": BATCH, "asynchronous": True, "max_staleness": staleness}
    return make_side(folder, engines, config=config | options.pop("config", {}), **options)


async def step_of(side: Side, engines: FakeEngines, turns: int) -> RolloutBatch:
    """One step: a batch, training for some turns of the event loop, new weights."""
    batch = await side.train()
    for _ in range(turns):
        await asyncio.sleep(0)
    engines.version = side.step
    side.manager.weights_changed(side.step)
    return batch


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10_000),
    staleness=st.integers(1, 4),
    turns=st.lists(st.integers(0, 30), min_size=4, max_size=12),
)
def test_batches_are_exact_within_the_bound_and_no_group_is_trained_twice(
    tmp_path_factory: pytest.TempPathFactory, seed: int, staleness: int, turns: list[int]
) -> None:
    engines = UnevenEngines(seed)
    side = stream_side(tmp_path_factory.mktemp("stream"), engines, staleness)

    async def main() -> None:
        for number in turns:
            batch = await step_of(side, engines, number)
            assert len(batch.groups) == BATCH
            indices = [group.group_index for group in batch.groups]
            assert indices == sorted(indices)
            for group in batch.groups:
                oldest = min(s.oldest_version for s in group.samples)
                assert side.step - 1 - oldest <= staleness
            assert batch.metrics["rollout/staleness_max"] <= staleness
            assert batch.metrics["rollout/live_groups"] <= (staleness + 1) * BATCH
        await side.manager.close()

    run(main)
    trained = [group.group_index for group in side.trained]
    assert len(trained) == len(set(trained)) == BATCH * len(turns)
    side.check_books()
    assert side.ledger.balance()[State.CONSUMED] == len(trained)


def test_answers_are_written_while_the_trainer_trains(tmp_path: Path) -> None:
    engines = FakeEngines(length=4)
    side = stream_side(tmp_path, engines, staleness=1)

    async def main() -> None:
        await side.train()
        before = len(engines.calls)
        await until(lambda: engines.num_running == 0)
        assert before <= len(engines.calls) == 2 * BATCH * 2, "one batch ahead, and no more"
        await side.manager.close()

    run(main)


def test_nothing_is_written_that_no_step_up_to_the_last_needs(tmp_path: Path) -> None:
    engines = UnevenEngines(5)
    side = stream_side(tmp_path, engines, staleness=3, last_step=4)

    async def main() -> None:
        for number in (4, 0, 9, 30):
            await step_of(side, engines, number)
        await until(lambda: engines.num_running == 0)
        await side.manager.close()

    run(main)
    assert len(engines.calls) == 4 * BATCH * 2
    assert sum(side.ledger.balance().values()) == 4 * BATCH
    side.check_books()


def test_finished_groups_that_could_make_another_late_start_afresh(tmp_path: Path) -> None:
    """A synchronous run leaves a surplus that an asynchronous one, resumed from it, cannot use."""
    engines = FakeEngines(length=4)
    source = make_source(64, 2)
    settings = {"batch_size": BATCH, "over_sampling_batch_size": 6 * BATCH, "max_staleness": 1}
    before = make_side(tmp_path, engines, config=settings, source=source)
    run(before.train)
    num_ready = before.manager.num_ready
    assert num_ready > 2 * BATCH
    saved = before.manager.state_dict()
    before.ledger.close()
    after = stream_side(tmp_path, engines, staleness=1, source=make_source(64, 2))
    after.manager.load_state_dict(saved)
    after.step, after.trained = 1, list(before.trained)
    engines.version = 1

    async def main() -> None:
        for _ in range(4):
            batch = await step_of(after, engines, 5)
            assert batch.metrics["rollout/staleness_max"] <= 1
        await after.manager.close()

    run(main)
    trained = [group.group_index for group in after.trained]
    assert sorted(trained) == list(range(5 * BATCH)), "oldest prompts first, each once"
    after.check_books()


def test_a_resume_goes_on_with_finished_groups_and_asks_those_in_flight_afresh(
    tmp_path: Path,
) -> None:
    source = make_source(64, 2)
    engines = UnevenEngines(3)
    side = stream_side(tmp_path, engines, staleness=2, source=source)
    saved: dict[str, object] = {}

    async def first() -> None:
        for number in (3, 0, 7):
            await step_of(side, engines, number)
        saved.update(side.manager.state_dict())
        await step_of(side, engines, 5)  # after the checkpoint: undone by the resume
        await side.manager.close()

    run(first)
    side.ledger.close()
    again = stream_side(tmp_path, engines, staleness=2, source=make_source(64, 2))
    again.step = 3
    again.trained = side.trained[: 3 * BATCH]
    engines.version = 3
    again.manager.load_state_dict(saved)

    async def second() -> None:
        for number in (2, 2, 2):
            await step_of(again, engines, number)
        await again.manager.close()

    run(second)
    trained = [group.group_index for group in again.trained]
    assert len(trained) == len(set(trained)) == 6 * BATCH
    again.check_books()
    issued = sum(again.ledger.balance().values())
    assert set(range(issued)) >= set(trained)
    assert min(set(range(64)) - set(trained)) >= 5 * BATCH - 2 * BATCH, "old prompts come first"


def test_an_error_while_the_trainer_trains_ends_the_next_collect(tmp_path: Path) -> None:
    engines = FakeEngines(length=4)
    side = stream_side(
        tmp_path,
        engines,
        staleness=1,
        config={"max_failure_rate": 0.1, "max_attempt_retries": 0},
    )

    def broken(_: Any) -> None:
        raise RuntimeError("the engine is on fire")

    async def steps(count: int) -> None:
        for _ in range(count):
            await step_of(side, engines, 20)

    async def main() -> None:
        await steps(1)
        engines.fault = broken
        with pytest.raises(RolloutError, match="on fire"):
            await steps(10)

    run(main)
    side.check_books()


class Deaf(FakeEngines):
    """Engines that never answer an abort."""

    async def abort_all(self, deadline_s: float) -> None:
        await asyncio.Event().wait()


def test_cancelling_a_run_waits_for_no_engine_and_books_everything(tmp_path: Path) -> None:
    engines = Deaf(8)
    side = stream_side(tmp_path, engines, staleness=1, config={"abort_timeout_s": 60.0})

    async def main() -> None:
        engines.hold()
        collecting = asyncio.create_task(side.collect())
        await engines.wait_for_calls(4 * BATCH)
        collecting.cancel()
        ended, _ = await asyncio.wait({collecting}, timeout=10.0)
        assert ended, "it waits for the abort"
        assert collecting.cancelled()
        assert engines.num_running == 0
        side.check_books()
        engines.release()
        batch = await side.train(version=0)
        assert [group.group_index for group in batch.groups] == [0, 1, 2]
        await until(lambda: engines.num_running == 0)
        await side.manager.close()

    run(main)


def test_closing_waits_for_no_engine_and_books_everything(tmp_path: Path) -> None:
    engines = Deaf(8)
    side = stream_side(tmp_path, engines, staleness=1, config={"abort_timeout_s": 60.0})

    async def main() -> None:
        await side.train()
        engines.hold()
        engines.version = 1
        side.manager.weights_changed(1)
        await engines.wait_for_calls(BATCH * 2)
        async with asyncio.timeout(10.0):
            await side.manager.close()
        assert engines.num_running == 0
        side.check_books()
        assert side.ledger.balance()[State.IN_FLIGHT] == 0

    run(main)


def test_a_run_that_takes_turns_asks_the_prompts_that_a_stream_had_in_flight(
    tmp_path: Path,
) -> None:
    engines = UnevenEngines(3)
    side = stream_side(tmp_path, engines, staleness=2, source=make_source(64, 2))
    saved: dict[str, object] = {}

    async def first() -> None:
        for number in (3, 0):
            await step_of(side, engines, number)
        saved.update(side.manager.state_dict())
        await side.manager.close()

    run(first)
    side.ledger.close()
    assert saved["in_flight"], "or there is nothing to see"
    again = make_side(tmp_path, engines, config={"batch_size": BATCH}, source=make_source(64, 2))
    again.step, again.trained = 2, side.trained[: 2 * BATCH]
    again.manager.load_state_dict(saved)
    again.check_books()

    async def second() -> None:
        for _ in range(3):
            await again.train()

    run(second)
    assert again.ledger.balance()[State.IN_FLIGHT] == 0, "none is forgotten"
    trained = sorted(group.group_index for group in again.trained)
    assert trained == list(range(5 * BATCH)), "oldest prompts first, each once"
    again.check_books()


def test_a_batch_hook_that_raises_loses_no_group(tmp_path: Path) -> None:
    def fails_once(groups: list[Group]) -> None:
        failed.append([group.group_index for group in groups])
        if len(failed) == 1:
            raise ZeroDivisionError("mine")

    failed: list[list[int]] = []
    side = stream_side(
        tmp_path, FakeEngines(4), staleness=1, hooks=LoadedHooks(sample_filter=fails_once)
    )

    async def main() -> None:
        with pytest.raises(HookError, match="mine"):
            await side.train()
        side.check_books()
        kept = {decode_group(data).group_index for data in side.manager.state_dict()["ready"]}
        assert kept >= set(failed[0])
        batch = await side.train(version=0)
        assert [group.group_index for group in batch.groups] == failed[0]
        await side.manager.close()

    run(main)
    side.check_books()


@pytest.mark.parametrize(
    "changes",
    [
        {"over_sampling_batch_size": 8},
        {"filters": {"over_sampling": "by_reward_std"}},
        {"filters": {"when_short": "keep"}},
        {"partial_rollout": True},
    ],
)
def test_settings_that_mean_nothing_here_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="asynchronous: does not go together with"):
        stream_side(tmp_path, FakeEngines(), 1, config=changes)
