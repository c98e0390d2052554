"""Batches over fake engines: surplus, abort, partial work, staleness, filters, failures."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import LengthJudge, Side, SlowRows, make_side, make_source, run

from rollmill.config.reward import RewardConfig
from rollmill.data.ledger import State
from rollmill.errors import HookError, RolloutError
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.hooks import LoadedHooks
from rollmill.sample import Group, Sample, Status, flatten
from rollmill.testing import FakeEngines
from rollmill.testing.fakes import FakeCall

NONZERO = {"filters": {"dynamic": "nonzero_std"}}


def indices(groups: list[Group]) -> list[int]:
    return [group.group_index for group in groups]


def row_of(call: FakeCall) -> int:
    return call.input_ids[0] - 100


def test_a_batch_has_its_size_is_in_order_and_is_booked(tmp_path: Path) -> None:
    side = make_side(tmp_path, FakeEngines(lambda call: 3 + row_of(call) % 5))

    async def main() -> None:
        batch = await side.train()
        assert indices(batch.groups) == [0, 1, 2, 3]
        assert all(sample.reward is not None for sample in flatten(batch.groups))
        side.check_books()
        assert side.ledger.balance()[State.CONSUMED] == 4

    run(main)


def test_surplus_groups_feed_the_next_step(tmp_path: Path) -> None:
    engines = FakeEngines(4)
    side = make_side(tmp_path, engines, config={"over_sampling_batch_size": 12, "max_staleness": 2})

    async def main() -> None:
        engines.hold()
        collecting = asyncio.create_task(side.train())
        await engines.wait_for_calls(24)
        engines.release()  # all twelve groups finish together
        assert len((await collecting).groups) == 4
        num_calls = len(engines.calls)
        assert side.manager.num_ready == 8
        side.check_books()
        second, third = await side.train(), await side.train()
        assert len(engines.calls) == num_calls  # nothing was generated again
        assert sorted(indices(side.trained)) == list(range(12))
        for batch in (second, third):
            assert indices(batch.groups) == sorted(indices(batch.groups))
            assert batch.metrics["rollout/wasted_tokens"] == 0

    run(main)


@pytest.mark.parametrize("masks", [False, True])  # masked as a whole it would teach nothing
def test_surplus_that_is_too_old_starts_afresh_and_is_counted_as_waste(
    tmp_path: Path, masks: bool
) -> None:
    engines = FakeEngines(4)
    config = {"over_sampling_batch_size": 8, "max_staleness": 0, "mask_off_policy": masks}
    side = make_side(tmp_path, engines, config=config)

    async def main() -> None:
        engines.hold()
        collecting = asyncio.create_task(side.train())
        await engines.wait_for_calls(16)
        engines.release()
        await collecting
        assert side.manager.num_ready == 4
        engines.version = 1
        batch = await side.train(version=1)
        assert batch.metrics["rollout/wasted_tokens/stale"] == 4 * 2 * 4
        assert {int(v) for s in flatten(batch.groups) for v in s.weight_versions} == {1}
        side.check_books()

    run(main)


def test_without_partial_rollout_unfinished_prompts_come_back_fresh(tmp_path: Path) -> None:
    engines = SlowRows({1})
    side = make_side(tmp_path, engines, config={"over_sampling_batch_size": 5})

    async def main() -> None:
        first = await side.train()
        assert indices(first.groups) == [0, 2, 3, 4]
        assert first.metrics["rollout/wasted_tokens/aborted"] == 2 * 4
        assert side.ledger.state_of(1) is State.ISSUED
        side.check_books()
        engines.rows.clear()
        second = await side.train()
        assert 1 in indices(second.groups)  # unfinished prompts come first
        sample = next(s for s in flatten(second.groups) if s.group_index == 1)
        assert len(sample.segments) == 1
        side.check_books()

    run(main)


def test_partial_rollout_goes_on_from_the_tokens_and_wastes_none(tmp_path: Path) -> None:
    engines = SlowRows({1})
    config = {"over_sampling_batch_size": 5, "partial_rollout": True}
    side = make_side(tmp_path, engines, config=config, max_new_tokens=20)

    async def main() -> None:
        first = await side.train()
        assert side.ledger.state_of(1) is State.WAITING
        (waiting,) = side.source._waiting.values()
        before = {s.attempt: s.tokens.tolist() for s in waiting.samples}
        assert all(s.status is Status.ABORTED and s.response_length == 4 for s in waiting.samples)
        engines.rows.clear()
        engines.version = 1
        num_calls = len(engines.calls)
        second = await side.train(version=1)
        continued = [c for c in engines.calls[num_calls:] if row_of(c) == 1]
        assert {c.sampling["max_new_tokens"] for c in continued} == {20 - 4}
        assert {c.input_ids for c in continued} == {tuple(t) for t in before.values()}
        for sample in flatten(second.groups):
            if sample.group_index == 1:
                assert sample.tokens.tolist()[: len(before[0])] == before[sample.attempt]
                assert [s.weight_version for s in sample.segments] == [0, 1]
                assert len(sample.loss_mask) == len(sample.rollout_log_probs) == 12
        assert first.metrics["rollout/wasted_tokens"] == 0
        assert second.metrics["rollout/wasted_tokens"] == 0
        side.check_books()

    run(main)


@pytest.mark.parametrize("masks", [True, False])
def test_tokens_beyond_the_staleness_bound_are_masked_or_thrown_away(
    tmp_path: Path, masks: bool
) -> None:
    engines = SlowRows({1})
    config = {"over_sampling_batch_size": 5, "partial_rollout": True, "mask_off_policy": masks}
    side = make_side(tmp_path, engines, config=config | {"max_staleness": 1})

    async def main() -> None:
        await side.train(version=0)
        engines.rows.clear()
        engines.version = 5
        batch = await side.train(version=5)
        sample = next(s for s in flatten(batch.groups) if s.group_index == 1)
        assert {int(v) for v in sample.weight_versions[sample.loss_mask]} == {5}
        assert len(sample.loss_mask) == sample.response_length == (12 if masks else 8)
        assert int(sample.loss_mask.sum()) == 8
        wasted = batch.metrics["rollout/wasted_tokens/stale"]
        assert wasted == (0 if masks else 8)

    run(main)


def test_finished_siblings_of_a_recycled_group_keep_their_tokens_in_the_loss(
    tmp_path: Path,
) -> None:
    class SlowAttempt(SlowRows):
        async def generate(self, rid: str, *arguments: Any, **options: Any) -> Any:
            if self.rows and rid.split("/")[1] != "3":  # group 1, attempt 1
                return await FakeEngines.generate(self, rid, *arguments, **options)
            return await super().generate(rid, *arguments, **options)

    engines = SlowAttempt({1})
    config = {"over_sampling_batch_size": 5, "partial_rollout": True, "mask_off_policy": True}
    side = make_side(tmp_path, engines, config=config)

    async def main() -> None:
        await side.train(version=0)
        (waiting,) = side.source._waiting.values()
        assert [s.status for s in waiting.samples] == [Status.COMPLETED, Status.ABORTED]
        assert waiting.samples[0].reward is not None
        engines.rows.clear()
        batch = await side.train(version=1)
        finished, continued = next(g for g in batch.groups if g.group_index == 1).samples
        assert finished.loss_mask.all()
        assert len(finished.segments) == 1  # not generated again
        assert len(continued.segments) == 2

    run(main)


def test_abort_does_not_wait_for_judges_of_doomed_samples(tmp_path: Path) -> None:
    class PickyJudge(LengthJudge):
        async def judge(self, sample: Sample) -> Any:
            if sample.group_index == 2:
                return await super().judge(sample)
            return await LengthJudge().judge(sample)

    judge = PickyJudge()
    side = make_side(tmp_path, FakeEngines(4), judge=judge, config={"over_sampling_batch_size": 5})

    async def main() -> None:
        judge.hold()
        started = time.monotonic()
        batch = await side.train()
        assert time.monotonic() - started < 1.5  # the judge would never have answered
        assert 2 not in indices(batch.groups)
        assert judge.num_cancelled == 2
        assert judge.num_waiting == 0
        # Its answers are whole, so they are kept: only judging is missing.
        assert side.ledger.state_of(2) is State.WAITING
        side.check_books()
        num_calls = len([c for c in side.context.engines.calls if row_of(c) == 2])
        judge.release()
        second = await side.train()
        assert 2 in indices(second.groups)
        assert len([c for c in side.context.engines.calls if row_of(c) == 2]) == num_calls

    run(main)


def test_an_engine_that_never_answers_an_abort_costs_the_deadline_and_no_more(
    tmp_path: Path,
) -> None:
    class Deaf(SlowRows):
        async def abort_all(self, deadline_s: float) -> None:
            await asyncio.Event().wait()

    side = make_side(
        tmp_path,
        Deaf({1}),
        config={"over_sampling_batch_size": 5, "abort_timeout_s": 0.2},
    )

    async def main() -> None:
        started = time.monotonic()
        await side.train()
        assert 0.2 <= time.monotonic() - started < 3.0
        assert side.ledger.state_of(1) is State.ISSUED
        side.check_books()

    run(main)


def test_code_that_swallows_its_cancellation_is_left_behind_with_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.rollout.tasks.GRACE_S", 0.2)
    stop = asyncio.Event()

    async def stubborn(sample: Sample, context: GenerateContext) -> Sample:
        if sample.group_index == 1 and context.step == 1:
            while not stop.is_set():
                try:
                    await stop.wait()
                except asyncio.CancelledError:
                    sample.metadata["was_here"] = True
        return await context.extend(sample)

    side = make_side(
        tmp_path,
        FakeEngines(4),
        hooks=LoadedHooks(generate=stubborn),
        config={"over_sampling_batch_size": 5, "abort_timeout_s": 0.1},
    )

    async def main() -> None:
        from rollmill.rollout import tasks

        end_all = tasks.end_all
        monkeypatch.setattr(
            "rollmill.rollout.round.end_all",
            lambda left, **options: end_all(left, grace_s=0.2, **options),
        )
        first = await side.train()
        assert indices(first.groups) == [0, 2, 3, 4]
        side.check_books()
        second = await side.train()
        assert 1 in indices(second.groups)
        stop.set()
        await asyncio.sleep(0.01)

    run(main)


def test_cancelling_a_run_is_prompt_and_books_everything(tmp_path: Path) -> None:
    engines = FakeEngines(8)
    side = make_side(tmp_path, engines, config={"abort_timeout_s": 60.0})

    async def main() -> None:
        engines.hold()
        collecting = asyncio.create_task(side.collect())
        await engines.wait_for_calls(8)
        started = time.monotonic()
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert time.monotonic() - started < 2.0
        assert engines.num_running == 0
        side.check_books()
        engines.release()
        batch = await side.train()
        assert indices(batch.groups) == [0, 1, 2, 3]

    run(main)


def test_groups_that_a_filter_rejects_are_replaced_and_booked_with_the_reason(
    tmp_path: Path,
) -> None:
    engines = FakeEngines(lambda call: 4 + row_of(call))
    judge = LengthJudge(lambda s: float(s.attempt) if s.group_index % 3 else 0.0)
    side = make_side(tmp_path, engines, judge=judge, config=NONZERO)

    async def main() -> None:
        batch = await side.train()
        assert len(batch.groups) == 4
        assert all(group.group_index % 3 for group in batch.groups)
        assert {reason for _, reason in batch.rejected} == {"zero_std_0"}
        assert batch.metrics["rollout/rejected/zero_std_0"] == len(batch.rejected)
        rejected_tokens = sum(g.num_response_tokens for g, _ in batch.rejected)
        assert batch.metrics["rollout/wasted_tokens/rejected"] == rejected_tokens > 0
        side.check_books()

    run(main)


def test_a_filter_that_rejects_everything_ends_the_run_and_names_the_filter(
    tmp_path: Path,
) -> None:
    side = make_side(
        tmp_path,
        FakeEngines(4),
        judge=LengthJudge(lambda _: 1.0),
        config={"filters": {"dynamic": "nonzero_std", "max_consecutive_rejections": 10}},
    )

    async def main() -> None:
        with pytest.raises(RolloutError, match="nonzero_std rejected 10 groups in a row"):
            await side.train()
        side.check_books()
        assert side.ledger.balance()[State.REJECTED] >= 10

    run(main)


def test_when_short_keep_books_the_groups_that_it_takes_back(tmp_path: Path) -> None:
    filters = {"dynamic": "nonzero_std", "max_consecutive_rejections": 4, "when_short": "keep"}
    side = make_side(
        tmp_path, FakeEngines(4), judge=LengthJudge(lambda _: 1.0), config={"filters": filters}
    )

    async def main() -> None:
        batch = await side.train()
        assert len(batch.groups) == 4
        side.check_books()
        assert side.ledger.balance()[State.CONSUMED] == 4

    run(main)


def test_the_reward_spread_ranks_over_sampled_groups(tmp_path: Path) -> None:
    spread = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.2, 4: 0.8, 5: 0.0}
    judge = LengthJudge(lambda s: s.attempt * spread[s.group_index % 6])
    for rest, state in (("reject", State.REJECTED), ("ready", State.READY)):
        filters = {"over_sampling": "by_reward_std", "over_sampling_rest": rest}
        config = {"batch_size": 3, "over_sampling_batch_size": 6, "filters": filters}
        side = make_side(tmp_path / rest, FakeEngines(4), judge=judge, config=config)

        async def main(side: Side = side, state: State = state, rest: str = rest) -> None:
            batch = await side.train()
            assert indices(batch.groups) == [1, 2, 4]
            assert [side.ledger.state_of(i) for i in (0, 3, 5)] == [state] * 3
            total = sum(
                batch.metrics[f"rollout/groups/{k}"]
                for k in ("in_flight", "accepted", "surplus", "rejected", "failed", "returned")
            )
            assert total == 6
            side.check_books()

        run(main)


def test_a_failed_attempt_is_tried_again_and_then_its_group_is_replaced(tmp_path: Path) -> None:
    engines = FakeEngines(4)
    tries: list[int] = []

    def fault(call: FakeCall) -> None:
        if row_of(call) in (1, 2):
            tries.append(row_of(call))
            if row_of(call) == 1 or tries.count(2) == 1:
                raise OSError(f"engine fell over in row {row_of(call)}")

    engines.fault = fault
    side = make_side(tmp_path, engines, config={"max_attempt_retries": 2})

    async def main() -> None:
        batch = await side.train()
        assert indices(batch.groups) == [0, 2, 3, 4]
        assert tries.count(1) == 2 * 3
        ((group, reason),) = batch.failed
        assert group.group_index == 1
        assert reason == "generate: OSError: engine fell over in row 1"
        assert side.ledger.state_of(1) is State.FAILED
        side.check_books()

    run(main)


def test_answers_beside_a_failed_one_are_not_waited_for_when_the_group_is_replaced(
    tmp_path: Path,
) -> None:
    def fault(call: FakeCall) -> None:
        if call.rid.startswith("train/0/"):  # group 0, attempt 0
            raise OSError("gone")

    async def generate(sample: Sample, context: GenerateContext) -> Sample:
        if sample.index == 1:  # group 0, attempt 1
            await asyncio.Event().wait()
        return await context.extend(sample)

    engines = FakeEngines(4)
    engines.fault = fault
    config = {"batch_size": 1, "max_attempt_retries": 1}
    side = make_side(tmp_path, engines, hooks=LoadedHooks(generate=generate), config=config)

    async def main() -> None:
        batch = await side.train()
        assert indices(batch.groups) == [1]  # asked for when group 0 had failed
        ((group, reason),) = batch.failed
        assert (group.group_index, reason) == (0, "generate: OSError: gone")
        side.check_books()

    run(main)


def test_on_failed_group_keep_trains_the_rest_of_the_group(tmp_path: Path) -> None:
    engines = FakeEngines(4)

    def fault(call: FakeCall) -> None:
        if call.rid.startswith("train/2/"):  # group 1, attempt 0
            raise OSError("gone")

    engines.fault = fault
    side = make_side(tmp_path, engines, config={"on_failed_group": "keep"})

    async def main() -> None:
        batch = await side.train()
        failed, other = batch.groups[1].samples
        assert (failed.status, failed.in_loss) == (Status.FAILED, False)
        assert (other.status, other.in_loss) == (Status.COMPLETED, True)
        assert batch.metrics["rollout/failed_samples"] == 1

    run(main)


def test_a_permanent_failure_ends_the_run_with_counted_reasons(tmp_path: Path) -> None:
    engines = FakeEngines(4)

    def fault(_: FakeCall) -> None:
        raise OSError("no route to host")

    engines.fault = fault
    side = make_side(tmp_path, engines)

    async def main() -> None:
        with pytest.raises(RolloutError, match="8 × generate: OSError: no route to host"):
            await side.train()
        side.check_books()

    run(main)


def test_a_broken_judge_fails_samples_and_leaves_no_task_behind(tmp_path: Path) -> None:
    class Broken(LengthJudge):
        async def judge(self, sample: Sample) -> Any:
            if sample.group_index == 1:
                raise RuntimeError("grader lost")
            return await super().judge(sample)

    side = make_side(tmp_path, FakeEngines(4), judge=Broken())

    async def main() -> None:
        batch = await side.train()
        assert indices(batch.groups) == [0, 2, 3, 4]
        assert batch.failed[0][1] == "reward: RuntimeError: grader lost"

    run(main)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyError("x")])
def test_nothing_that_user_code_raises_ends_the_run(tmp_path: Path, error: BaseException) -> None:
    async def generate(sample: Sample, context: GenerateContext) -> Sample:
        if sample.group_index == 1:
            raise error
        return await context.extend(sample)

    side = make_side(tmp_path, FakeEngines(4), hooks=LoadedHooks(generate=generate))

    async def main() -> None:
        batch = await side.train()
        assert indices(batch.groups) == [0, 2, 3, 4]
        assert type(error).__name__ in batch.failed[0][1]
        side.check_books()

    run(main)


def test_a_failed_rollout_leaves_nothing_behind_for_the_next_one(tmp_path: Path) -> None:
    engines = FakeEngines(4)
    side = make_side(tmp_path, engines, config={"max_attempt_retries": 0})

    def fault(_: FakeCall) -> None:
        raise OSError("down")

    async def main() -> None:
        engines.fault = fault
        with pytest.raises(RolloutError):
            await side.train()
        assert engines.num_running == 0
        side.check_books()
        engines.fault = lambda _: None
        issued = side.source._next_group
        num_calls = len(engines.calls)
        batch = await side.train()
        fresh = [i for i in indices(batch.groups) if i >= issued]
        at_source = [i for i in indices(batch.groups) if i < issued]
        assert len(engines.calls) - num_calls == 2 * 4  # each group of the batch, once
        assert len(fresh) + len(at_source) == 4
        side.check_books()

    run(main)


def test_one_prompt_wraps_into_as_many_groups_as_a_batch_needs(tmp_path: Path) -> None:
    side = make_side(tmp_path, FakeEngines(4), num_prompts=3, config={"batch_size": 8})

    async def main() -> None:
        batch = await side.train()
        assert len(batch.groups) == 8
        assert len({s.index for s in flatten(batch.groups)}) == 16

    run(main)


def test_a_source_that_gives_too_few_groups_is_named_and_not_waited_for(tmp_path: Path) -> None:
    source = make_source(4)
    take = source.take
    source.take = lambda n: take(n)[1:]  # type: ignore[method-assign]
    side = make_side(tmp_path, FakeEngines(4), source=source)

    async def main() -> None:
        with pytest.raises(HookError, match="another number of groups"):
            await side.train()

    run(main)


def test_a_checkpoint_brings_back_surplus_partial_work_and_the_position(tmp_path: Path) -> None:
    engines = SlowRows({1})
    config = {"over_sampling_batch_size": 7, "partial_rollout": True}
    side = make_side(tmp_path, engines, config=config)

    async def main() -> None:
        await side.train()
        state = side.manager.state_dict()
        ready, waiting = side.manager.num_ready, list(side.source._waiting)
        assert ready
        assert waiting
        engines.rows.clear()
        lost = await side.train()
        await side.train()
        side.manager.load_state_dict(state)
        assert side.manager.num_ready == ready
        assert list(side.source._waiting) == waiting
        side.check_books()
        side.step, side.trained = 1, []
        again = await side.train()
        assert indices(again.groups) == indices(lost.groups)
        assert [s.tokens.tolist() for s in flatten(again.groups)] == [
            s.tokens.tolist() for s in flatten(lost.groups)
        ]

    run(main)


def test_a_batch_hook_that_raises_is_named_and_loses_no_group(tmp_path: Path) -> None:
    def broken(groups: list[Group]) -> None:
        raise ZeroDivisionError("mine")

    side = make_side(tmp_path, FakeEngines(4), hooks=LoadedHooks(sample_filter=broken))

    async def main() -> None:
        with pytest.raises(HookError, match=r"rollout\.hooks\.sample_filter"):
            await side.train()
        assert side.manager.num_ready == 4
        side.check_books()

    run(main)


def test_a_group_reward_sees_all_answers_and_comes_before_the_filter(tmp_path: Path) -> None:
    class Group2(LengthJudge):
        sizes: list[int] = []  # noqa: RUF012

        async def judge_group(self, samples: Any) -> Any:
            self.sizes.append(len(samples))
            return await super().judge_group(samples)

    judge = Group2(lambda sample: float(sample.attempt))
    reward = RewardConfig(function="mine.py:reward", per_group=True)
    side = make_side(tmp_path, FakeEngines(4), judge=judge, reward=reward, config=NONZERO)

    async def main() -> None:
        batch = await side.train()
        assert judge.sizes == [2, 2, 2, 2]
        assert [s.reward for s in batch.groups[0].samples] == [0.0, 1.0]

    run(main)


def test_progress_counts_only_this_batch(tmp_path: Path) -> None:
    side = make_side(tmp_path, FakeEngines(4))

    async def main() -> None:
        for _ in range(2):
            side.progress.clear()
            await side.train()
            last = side.progress[-1]
            assert (last.accepted, last.target, last.in_flight) == (4, 4, 0)
            assert last.tokens == 4 * 2 * 4

    run(main)


def test_two_runs_in_one_process_share_nothing(tmp_path: Path) -> None:
    first = make_side(tmp_path / "a", FakeEngines(4), max_requests=2)
    second = make_side(tmp_path / "b", FakeEngines(7), max_requests=5)

    async def main() -> None:
        one, two = await asyncio.gather(first.train(), second.train())
        assert indices(one.groups) == indices(two.groups) == [0, 1, 2, 3]
        assert {s.response_length for s in flatten(one.groups)} == {4}
        assert {s.response_length for s in flatten(two.groups)} == {7}
        assert one.metrics["rollout/max_requests_in_flight"] == 2
        assert one.metrics["rollout/generated_tokens"] == 32
        assert two.metrics["rollout/max_requests_in_flight"] == 5
        first.check_books()
        second.check_books()

    run(main)


def test_the_event_loop_stays_free_while_everything_is_rejected(tmp_path: Path) -> None:
    side = make_side(
        tmp_path,
        FakeEngines(2),
        judge=LengthJudge(lambda _: 1.0),
        config={"filters": {"dynamic": "nonzero_std", "max_consecutive_rejections": 200}},
    )

    async def main() -> None:
        num_beats = 0

        async def beat() -> None:
            nonlocal num_beats
            while True:
                num_beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        with pytest.raises(RolloutError):
            await side.train()
        beating.cancel()
        assert num_beats > 100

    run(main)


def test_generate_functions_see_the_training_step(tmp_path: Path) -> None:
    steps: list[int] = []

    async def generate(sample: Sample, context: GenerateContext) -> Sample:
        steps.append(context.step)
        return await context.extend(sample)

    side = make_side(tmp_path, FakeEngines(4), hooks=LoadedHooks(generate=generate))

    async def main() -> None:
        await side.train()
        await side.train()
        assert steps == [1] * 8 + [2] * 8

    run(main)


def test_an_over_sampling_filter_that_keeps_too_few_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def first(groups):\n    return groups[:1]\n")
    config = {"over_sampling_batch_size": 6, "filters": {"over_sampling": "own.py:first"}}
    side = make_side(tmp_path, FakeEngines(4), config=config)

    async def main() -> None:
        with pytest.raises(HookError, match="kept fewer groups than a batch holds"):
            await side.train()
        side.check_books()
        assert side.manager.num_ready == 6

    run(main)


def test_requests_that_user_code_left_behind_are_stopped_with_the_batch(tmp_path: Path) -> None:
    engines = SlowRows({1})
    left: list[asyncio.Task[Sample]] = []

    async def careless(sample: Sample, context: GenerateContext) -> Sample:
        if sample.group_index == 1:
            left.append(asyncio.create_task(context.extend(sample)))
            await asyncio.sleep(0)
            raise ValueError("and gone")
        return await context.extend(sample)

    hooks = LoadedHooks(generate=careless)
    side = make_side(tmp_path, engines, hooks=hooks, config={"max_attempt_retries": 1})

    async def main() -> None:
        batch = await side.train()
        assert indices(batch.groups) == [0, 2, 3, 4]
        assert engines.num_running == side.context.gate.num_inside == 0
        await asyncio.gather(*left)
        ((failed, _),) = batch.failed
        assert all(not sample.segments for sample in failed.samples)  # they wrote to older samples

    run(main)


def test_a_batch_hook_that_raises_after_the_ranking_brings_no_rejected_group_back(
    tmp_path: Path,
) -> None:
    def broken(groups: list[Group]) -> None:
        raise ZeroDivisionError("mine")

    filters = {"over_sampling": "by_reward_std", "over_sampling_rest": "reject"}
    config = {"batch_size": 3, "over_sampling_batch_size": 6, "filters": filters}
    hooks = LoadedHooks(sample_filter=broken)
    side = make_side(tmp_path, FakeEngines(4), hooks=hooks, config=config)

    async def main() -> None:
        with pytest.raises(HookError, match="mine"):
            await side.train()
        assert side.ledger.balance()[State.REJECTED] == 3
        assert side.manager.num_ready == 3
        side.check_books()

    run(main)
