"""What an unfinished or too old group keeps, attempt by attempt, when its batch is over."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import LengthJudge, Side, SlowRows, make_side, make_source, run

from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.data.ledger import Ledger, State
from rollmill.rollout.books import Books
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.hooks import LoadedHooks
from rollmill.rollout.round import ATTEMPTS_PER_TURN
from rollmill.rollout.supply import StepSupply
from rollmill.rollout.usage import Loss, Usage
from rollmill.sample import Group, Sample, Segment, Status, flatten
from rollmill.testing import FakeEngines

SLOW = 3
"""Index of attempt 1 of group 1."""
OVER = {"over_sampling_batch_size": 5}


class SlowSample(SlowRows):
    """Engines that answer one sample only when aborted, until `rows` is cleared."""

    def __init__(self) -> None:
        super().__init__({1})

    async def generate(self, rid: str, *arguments: Any, **options: Any) -> Any:
        if int(rid.split("/")[1]) != SLOW:
            return await FakeEngines.generate(self, rid, *arguments, **options)
        return await super().generate(rid, *arguments, **options)

    def num_calls(self, index: int) -> int:
        return sum(call.rid.startswith(f"train/{index}/") for call in self.calls)


def versions(sample: Sample) -> set[int]:
    return {int(v) for v in sample.weight_versions}


async def step(side: Side, engines: FakeEngines, version: int) -> Any:
    engines.version = version
    return await side.train(version)


def of_group(groups: list[Group], index: int) -> list[Sample]:
    return next(group.samples for group in groups if group.group_index == index)


def test_finished_answers_of_an_unfinished_group_are_kept_and_only_the_others_start_afresh(
    tmp_path: Path,
) -> None:
    def score(sample: Sample) -> float:
        judged.append(sample.index)
        return 1.0

    judged: list[int] = []
    engines, judge = SlowSample(), LengthJudge(score)
    side = make_side(tmp_path, engines, judge=judge, config=OVER)

    async def main() -> None:
        first = await step(side, engines, 0)
        (waiting,) = side.source._waiting.values()
        assert [s.status for s in waiting.samples] == [Status.COMPLETED, Status.PENDING]
        assert side.ledger.state_of(1) is State.WAITING
        assert first.metrics["rollout/wasted_tokens"] == 4  # of the aborted attempt
        side.check_books()
        engines.rows.clear()
        second = await step(side, engines, 1)
        kept, fresh = of_group(second.groups, 1)
        assert (versions(kept), versions(fresh)) == ({0}, {1})
        assert (engines.num_calls(2), engines.num_calls(SLOW)) == (1, 2)
        assert (judged.count(2), judged.count(SLOW)) == (1, 1)
        assert second.metrics["rollout/wasted_tokens"] == 0
        side.check_books()

    run(main)


def test_with_no_staleness_allowed_a_kept_answer_is_trained_by_the_weights_that_wrote_it_or_never(
    tmp_path: Path,
) -> None:
    for version, num_lost in ((0, 0), (1, 8)):
        engines = SlowSample()
        config = OVER | {"max_staleness": 0}
        side = make_side(tmp_path / str(version), engines, config=config)

        async def main(
            side: Side = side,
            engines: SlowSample = engines,
            version: int = version,
            num_lost: int = num_lost,
        ) -> None:
            await step(side, engines, 0)
            engines.rows.clear()
            batch = await step(side, engines, version)
            assert {v for s in flatten(batch.groups) for v in versions(s)} == {version}
            assert batch.metrics["rollout/wasted_tokens/stale"] == num_lost
            side.check_books()

        run(main)


@pytest.mark.parametrize("partial", [False, True])
def test_only_the_attempts_that_are_too_old_start_afresh(tmp_path: Path, partial: bool) -> None:
    engines = SlowSample()
    config = {"batch_size": 1, "over_sampling_batch_size": 2, "max_staleness": 2}
    side = make_side(tmp_path, engines, config=config | {"partial_rollout": partial})

    async def main() -> None:
        await step(side, engines, 0)  # group 1: attempt 0 is finished, attempt 1 is not
        assert side.ledger.state_of(1) is State.WAITING
        waiting = side.source._waiting[1]
        finished, unfinished = waiting.samples
        assert finished.status is Status.COMPLETED
        num_partial = unfinished.response_length
        assert num_partial == (4 if partial else 0)
        engines.rows.clear()
        batch = await step(side, engines, 3)
        first, second = of_group(batch.groups, 1)
        assert versions(first) == versions(second) == {3}
        assert batch.metrics["rollout/wasted_tokens/stale"] == 8 + num_partial
        side.check_books()

    run(main)


def supply_with(tmp_path: Path, **config: Any) -> tuple[StepSupply, Group]:
    """The supply of weights of version 4, and a group taken from its source.

    Its attempts are finished: the first by version 0, the second by version 3.
    """
    source, ledger = make_source(4), Ledger(tmp_path / "ledger.sqlite")
    books = Books(ledger, 5)
    (group,) = source.take(1)
    for state in (State.ISSUED, State.IN_FLIGHT):
        books.record(group, state)
    for sample, version in zip(group.samples, (0, 3), strict=True):
        sample.segments = [Segment.from_engine([5, 6, 7], [-1.0] * 3, version)]
        sample.status, sample.reward = Status.COMPLETED, 1.0
    settings = RolloutConfig.model_validate(
        {"n_samples_per_prompt": 2, "max_staleness": 2} | config
    )
    return StepSupply(settings, source, books, Usage(), version=4, ready=[group]), group


def test_surplus_with_one_answer_that_is_too_old_waits_for_that_answer_alone(
    tmp_path: Path,
) -> None:
    supply, group = supply_with(tmp_path)
    supply.books.record(group, State.READY)
    assert supply.take_ready() == []
    assert supply.books.state_of(group) is State.WAITING
    assert supply.usage.lost == {Loss.STALE: 3}
    assert supply.take(1) == [group]
    assert [(s.status, s.reward) for s in group.samples] == [
        (Status.PENDING, None),
        (Status.COMPLETED, 1.0),
    ]
    assert supply.usage.lost == {Loss.STALE: 3}


def test_masking_throws_no_answer_of_a_group_away_that_still_teaches_something(
    tmp_path: Path,
) -> None:
    supply, group = supply_with(tmp_path, mask_off_policy=True)
    supply.books.record(group, State.READY)
    assert supply.take_ready() == [group]
    assert [s.loss_mask.any() for s in group.samples] == [False, True]
    assert not supply.usage.lost


def test_rollouts_ahead_of_the_trainer_take_no_older_answers_from_the_source(
    tmp_path: Path,
) -> None:
    supply, group = supply_with(tmp_path, asynchronous=True)
    supply.give_back(group)
    assert supply.books.state_of(group) is State.WAITING
    assert supply.take(1) == [group]
    assert all(s.status is Status.PENDING and not s.segments for s in group.samples)
    assert supply.usage.lost.total() == supply.usage.lost[Loss.STALE] == 6


@pytest.mark.parametrize("partial", [False, True])
def test_an_attempt_that_fanned_out_restarts_as_a_whole_or_not_at_all(
    tmp_path: Path, partial: bool
) -> None:
    async def two_ways(sample: Sample, context: GenerateContext) -> list[Sample]:
        if sample.segments or "sibling" in sample.metadata:
            return [await context.extend(sample)]
        twin = context.sibling(sample)
        await asyncio.gather(context.extend(twin), context.extend(sample))
        return [sample, twin]

    engines = SlowSample()  # the sample of attempt 1 is slow, its twin is not
    hooks = LoadedHooks(generate=two_ways)
    side = make_side(tmp_path, engines, hooks=hooks, config=OVER | {"partial_rollout": partial})

    async def main() -> None:
        await step(side, engines, 0)
        states = [s.status for s in side.source._waiting[1].samples]
        kept = [Status.COMPLETED] * 2
        assert states == kept + (
            [Status.ABORTED, Status.COMPLETED] if partial else [Status.PENDING]
        )
        engines.rows.clear()
        batch = await step(side, engines, 1)
        samples = of_group(batch.groups, 1)
        assert [s.attempt for s in samples] == [0, 0, 1, 1]
        assert len({s.index for s in samples}) == 4
        assert [versions(s) for s in samples[:2]] == [{0}, {0}]
        side.check_books()

    run(main)


def test_a_group_reward_sees_kept_and_new_answers_together(tmp_path: Path) -> None:
    class Whole(LengthJudge):
        async def judge_group(self, samples: Any) -> Any:
            if samples[0].group_index == 1:
                seen.append([(s.attempt, *versions(s)) for s in samples])
            return await super().judge_group(samples)

    seen: list[Any] = []
    engines = SlowSample()
    reward = RewardConfig(function="mine.py:reward", per_group=True)
    side = make_side(tmp_path, engines, judge=Whole(), reward=reward, config=OVER)

    async def main() -> None:
        await step(side, engines, 0)
        engines.rows.clear()
        batch = await step(side, engines, 1)
        assert seen == [[(0, 0), (1, 1)]]
        assert all(s.reward is not None for s in of_group(batch.groups, 1))

    run(main)


def test_a_checkpoint_holds_the_finished_answers_of_unfinished_groups(tmp_path: Path) -> None:
    engines = SlowSample()
    side = make_side(tmp_path, engines, config=OVER)

    async def main() -> None:
        await step(side, engines, 0)
        before = side.source._waiting[1].samples[0].tokens.tolist()
        state = side.manager.state_dict()
        engines.rows.clear()
        await step(side, engines, 1)
        side.manager.load_state_dict(state)
        side.check_books()
        side.step, side.trained = 1, []
        again = await step(side, engines, 1)
        kept, _ = of_group(again.groups, 1)
        assert kept.tokens.tolist() == before
        assert engines.num_calls(kept.index) == 1

    run(main)


def many_unfinished(tmp_path: Path, num_groups: int) -> tuple[Side, SlowRows]:
    engines = SlowRows(set(range(1, num_groups)))
    config = {"batch_size": 1, "over_sampling_batch_size": num_groups}
    return make_side(
        tmp_path, engines, num_prompts=num_groups, max_requests=512, config=config
    ), engines


def test_thousands_of_unfinished_groups_are_put_back_a_few_per_turn_of_the_event_loop(
    tmp_path: Path,
) -> None:
    side, _ = many_unfinished(tmp_path, 128)
    beats_at: list[int] = []
    give_back = side.source.give_back

    def watched(groups: Any) -> None:
        beats_at.append(num_beats)
        give_back(groups)

    side.source.give_back = watched  # type: ignore[method-assign]
    num_beats = 0

    async def main() -> None:
        nonlocal num_beats
        collecting = asyncio.create_task(side.train())
        while not collecting.done():
            num_beats += 1
            await asyncio.sleep(0)
        assert len(beats_at) == 127
        per_turn = max(Counter(beats_at).values())
        assert per_turn * 2 <= ATTEMPTS_PER_TURN  # two attempts per group
        side.check_books()

    run(main)


def test_a_run_that_is_cancelled_while_groups_are_put_back_still_books_all_of_them(
    tmp_path: Path,
) -> None:
    side, _ = many_unfinished(tmp_path, 128)
    given_back: list[int] = []
    give_back = side.source.give_back

    def watched(groups: Any) -> None:
        give_back(groups)
        given_back.append(groups[0].group_index)
        if len(given_back) == 20:
            collecting.cancel()

    side.source.give_back = watched  # type: ignore[method-assign]
    collecting: asyncio.Task[Any]

    async def main() -> None:
        nonlocal collecting
        collecting = asyncio.create_task(side.collect())
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert len(given_back) == 127
        assert side.manager.num_ready == 1  # the batch, which nobody got
        side.check_books()

    run(main)


def test_an_answer_that_an_engine_fails_to_give_back_is_asked_for_again_not_failed(
    tmp_path: Path,
) -> None:
    class Forgetful(SlowRows):
        """Instead of answering an abort it loses the request."""

        def _answer(self, call: Any, *, is_aborted: bool) -> Any:
            if is_aborted:
                raise OSError("the engine did not answer an abort")
            return super()._answer(call, is_aborted=is_aborted)

    engines = Forgetful({1})
    side = make_side(tmp_path, engines, config=OVER | {"max_attempt_retries": 0})

    async def main() -> None:
        first = await step(side, engines, 0)
        assert not first.failed
        assert side.ledger.state_of(1) is State.ISSUED
        side.check_books()
        engines.rows.clear()
        second = await step(side, engines, 1)
        assert 1 in [group.group_index for group in second.groups]

    run(main)
