"""One group: retries, fan-out, hooks, multi-turn, overrides; alone, aborted and gone on with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import LengthJudge, run, until

from rollmill.config.reward import RewardConfig
from rollmill.config.sampling import SamplingConfig
from rollmill.engine.types import GenerateResult
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rollout.fresh import is_done, restart_group
from rollmill.rollout.generate import GenerateContext, generate_single_turn
from rollmill.rollout.group import GroupRunner
from rollmill.rollout.hooks import generate_overrides
from rollmill.sample import Group, Sample, Status, attempt_rewards
from rollmill.testing import FakeEngines, make_context, make_sample
from rollmill.testing.fakes import FakeCall


def fresh_group(n: int = 2, **fields: Any) -> Group:
    return Group(0, [make_sample(attempt, attempt=attempt, **fields) for attempt in range(n)])


def make_runner(
    context: GenerateContext,
    generate: Any = generate_single_turn,
    *,
    judge: Any = None,
    reward: RewardConfig | None = None,
    base_dir: Path = Path(),
    **options: Any,
) -> GroupRunner:
    return GroupRunner(
        generate=generate,
        overrides=generate_overrides(base_dir),
        context=context,
        judge=judge or LengthJudge(),
        reward=reward or RewardConfig(type="math"),
        max_retries=options.pop("max_retries", 2),
        **options,
    )


async def three_ways(sample: Sample, context: GenerateContext) -> list[Sample]:
    """An answer and two sub-agents; a sample that was returned before is gone on with alone."""
    if sample.segments or "sibling" in sample.metadata:
        return [await context.extend(sample)]
    siblings = [context.sibling(sample) for _ in range(2)]
    for each in (sample, *siblings):
        await context.extend(each)
    return [sample, *siblings]


def test_fan_out_siblings_share_the_attempt_and_count_once() -> None:
    async def main() -> None:
        judge = LengthJudge(lambda sample: float(sample.attempt))
        runner = make_runner(make_context(), three_ways, judge=judge)
        group = await runner.run(fresh_group(2))
        assert [s.attempt for s in group.samples] == [0, 0, 0, 1, 1, 1]
        assert len({s.index for s in group.samples}) == 6
        assert len(group.attempts()) == 2
        assert attempt_rewards(group) == [0.0, 1.0]
        assert judge.num_judged == 6

    run(main)


def test_no_two_siblings_share_a_random_stream() -> None:
    async def main() -> None:
        engines = FakeEngines(8)
        group = await make_runner(make_context(engines), three_ways).run(fresh_group(2))
        seeds = [call.sampling["sampling_seed"] for call in engines.calls]
        assert len(set(seeds)) == len(seeds) == 6
        answers = {tuple(s.response_tokens.tolist()) for s in group.samples}
        assert len(answers) == 6
        again = FakeEngines(8)
        await make_runner(make_context(again, max_requests=1), three_ways).run(fresh_group(2))
        assert sorted(c.sampling["sampling_seed"] for c in again.calls) == sorted(seeds)

    run(main)


def test_an_aborted_fan_out_keeps_its_finished_siblings_and_goes_on_with_the_others() -> None:
    async def main() -> None:
        engines = FakeEngines(8)
        context = make_context(engines)
        runner = make_runner(context, three_ways)
        held = FakeEngines.generate

        async def generate(rid: str, *arguments: Any, **options: Any) -> GenerateResult:
            engines.is_held = len(engines.calls) >= 1  # all but the first call are held
            return await held(engines, rid, *arguments, **options)

        engines.generate = generate  # type: ignore[method-assign]
        group = fresh_group(1)
        task = asyncio.create_task(runner.run(group))
        while len(engines.calls) < 2:
            await engines.wait_for_calls(1)
            await asyncio.sleep(0)
        context.gate.close()
        await engines.abort_all(1.0)
        await task
        states = [s.status for s in group.samples]
        assert states == [Status.COMPLETED, Status.ABORTED, Status.ABORTED]
        before = [s.tokens.tolist() for s in group.samples]
        engines.generate = lambda *a, **k: held(engines, *a, **k)  # type: ignore[method-assign]
        engines.is_held = False
        context.gate.open()
        await runner.run(group)
        assert all(map(is_done, group.samples))
        assert len(group.samples) == 3
        for sample, tokens in zip(group.samples, before, strict=True):
            assert sample.tokens.tolist()[: len(tokens)] == tokens
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert group.samples[0].tokens.tolist() == before[0]

    run(main)


def test_a_cancelled_group_holds_everything_that_was_written() -> None:
    async def main() -> None:
        engines = FakeEngines(8)
        context = make_context(engines)
        judge = LengthJudge()
        judge.hold()
        group = fresh_group(2)
        task = asyncio.create_task(make_runner(context, three_ways, judge=judge).run(group))
        await until(lambda: judge.num_waiting == 6)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [s.status for s in group.samples] == [Status.COMPLETED] * 6
        assert all(s.reward is None and s.response_length == 8 for s in group.samples)

    run(main)


def test_a_multi_turn_answer_cut_off_between_turns_is_not_taken_for_finished() -> None:
    async def two_turns(sample: Sample, context: GenerateContext) -> Sample:
        await context.extend(sample)
        context.append_environment(sample, [50, 51])
        await context.wait_for(asyncio.Event().wait())  # a tool that never answers
        return sample

    async def main() -> None:
        context = make_context(FakeEngines(4))
        group = fresh_group(1)
        task = asyncio.create_task(make_runner(context, two_turns).run(group))
        await until(lambda: bool(group.samples[0].segments))
        context.gate.close()
        await task
        (sample,) = group.samples
        assert sample.status is Status.ABORTED
        assert sample.response_length == 6
        assert sample.loss_mask.tolist() == [True] * 4 + [False] * 2

    run(main)


def test_a_retry_starts_from_the_prompt_with_the_metadata_of_the_data() -> None:
    seen: list[dict[str, Any]] = []

    async def moody(sample: Sample, context: GenerateContext) -> Sample:
        seen.append(dict(sample.metadata, segments=len(sample.segments)))
        sample.metadata["notes"] = ["mine"]
        await context.extend(sample)
        if len(seen) < 3:
            raise ValueError("bad day")
        return sample

    async def main() -> None:
        context = make_context(FakeEngines(4))
        group = await make_runner(context, moody).run(fresh_group(1))
        assert seen == [{"id": 0, "segments": 0}] * 3
        assert group.samples[0].status is Status.COMPLETED
        assert group.samples[0].response_length == 4
        assert context.usage.num_generated == 12
        assert sum(context.usage.lost.values()) == 8

    run(main)


def test_the_reason_of_the_last_failure_is_on_the_sample() -> None:
    async def broken(sample: Sample, context: GenerateContext) -> Sample:
        raise ValueError("no\nsecond line")

    async def main() -> None:
        group = await make_runner(make_context(), broken).run(fresh_group(1))
        assert group.samples[0].status is Status.FAILED
        assert group.samples[0].failure == "generate: ValueError: no"

    run(main)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda s, c: None, "returned NoneType"),
        (lambda s, c: [], "returned list"),
        (lambda s, c: [s, s], "one index twice"),
        (lambda s, c: make_sample(5, attempt=9, status=Status.COMPLETED), "changed group_index"),
        (lambda s, c: s, "left pending by the generate function"),
    ],
)
def test_a_malformed_answer_of_a_generate_function_is_told(answer: Any, reason: str) -> None:
    async def generate(sample: Sample, context: GenerateContext) -> Any:
        return answer(sample, context)

    async def main() -> None:
        group = await make_runner(make_context(), generate).run(fresh_group(1))
        assert group.samples[0].status is Status.FAILED
        assert reason in (group.samples[0].failure or "")

    run(main)


def test_aborts_by_the_engine_itself_cost_no_retry_while_there_is_progress() -> None:
    class Interrupted(FakeEngines):
        """Writes two tokens at a time and then aborts, as an engine does that gets new weights."""

        def _answer(self, call: FakeCall, *, is_aborted: bool) -> GenerateResult:
            whole = int(call.sampling["max_new_tokens"]) <= 2
            self.length = 100 if whole else 4
            return super()._answer(call, is_aborted=not whole)

    async def main() -> None:
        engines = Interrupted()
        context = make_context(engines, sampling=SamplingConfig(max_new_tokens=20))
        group = await make_runner(context, max_retries=0).run(fresh_group(1))
        (sample,) = group.samples
        assert sample.status is Status.TRUNCATED
        assert sample.response_length == 20
        assert sample.reward is not None
        assert len(engines.calls) == 10

    run(main)


def test_an_engine_that_aborts_everything_at_once_fails_the_sample() -> None:
    class Refusing(FakeEngines):
        def _answer(self, call: FakeCall, *, is_aborted: bool) -> GenerateResult:
            return GenerateResult.aborted_before_start()

    async def main() -> None:
        engines = Refusing()
        group = await make_runner(make_context(engines), max_retries=2).run(fresh_group(1))
        assert group.samples[0].failure == "generate: aborted by the engine"
        assert len(engines.calls) == 3

    run(main)


@pytest.mark.parametrize("hook_kind", ["sync", "async"])
def test_sample_hooks_run_between_generation_and_reward(hook_kind: str) -> None:
    def hook(sample: Sample) -> None:
        assert sample.reward is None
        sample.response = "changed"

    async def async_hook(sample: Sample) -> None:
        hook(sample)

    judged: list[str] = []

    def score(sample: Sample) -> float:
        judged.append(sample.response)
        return 1.0

    async def main() -> None:
        runner = make_runner(
            make_context(),
            judge=LengthJudge(score),
            sample_hook=hook if hook_kind == "sync" else async_hook,
        )
        await runner.run(fresh_group(2))
        assert judged == ["changed"] * 2

    run(main)


@pytest.mark.parametrize(
    ("reward", "failure"),
    [
        (0.5, None),
        (float("nan"), "expected the reward to be a finite number"),
        ("good", "found 'good'"),
        ({"a": 1.0}, "reward_key"),
    ],
)
def test_a_reward_set_by_the_generate_function_is_checked_and_not_judged_again(
    reward: Any, failure: str | None
) -> None:
    async def generate(sample: Sample, context: GenerateContext) -> Sample:
        await context.extend(sample)
        sample.reward = reward
        return sample

    async def main() -> None:
        judge = LengthJudge()
        group = await make_runner(make_context(), generate, judge=judge).run(fresh_group(1))
        (sample,) = group.samples
        assert judge.num_judged == 0
        if failure is None:
            assert (sample.reward, sample.reward_outcome) == (reward, "value")
        else:
            assert sample.status is Status.FAILED
            assert failure in (sample.failure or "")

    run(main)


def test_a_sample_may_name_its_own_generate_function(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "async def generate(sample, context):\n"
        "    sample.metadata['own'] = True\n"
        "    return await context.extend(sample)\n"
        "def wrong(sample):\n"
        "    return sample\n"
    )

    async def main() -> None:
        runner = make_runner(make_context(), base_dir=tmp_path)
        group = fresh_group(4)
        for sample, name in zip(group.samples, ["own.py:generate", "own.py:wrong", "no.py:f", None],
                                strict=True):  # fmt: skip
            sample.generate_function = name
        first, wrong, missing, plain = (await runner.run(group)).samples
        assert first.status is Status.COMPLETED
        assert first.metadata["own"]
        assert wrong.status is missing.status is Status.FAILED
        assert "cannot be called as its hook requires" in (wrong.failure or "")
        assert "does not exist" in (missing.failure or "")
        assert plain.status is Status.COMPLETED
        assert "own" not in plain.metadata

    run(main)


def test_a_group_reward_with_the_wrong_number_of_outcomes_fails_the_group() -> None:
    class Short(LengthJudge):
        async def judge_group(self, samples: Any) -> list[Outcome]:
            return [Outcome(OutcomeKind.VALUE, 1.0)]

    async def main() -> None:
        reward = RewardConfig(function="mine.py:f", per_group=True)
        runner = make_runner(make_context(), judge=Short(), reward=reward)
        group = await runner.run(fresh_group(3))
        assert all(s.failure == "reward: ValueError: expected 3 outcomes, found 1"
                   for s in group.samples)  # fmt: skip

    run(main)


def test_finished_samples_pass_through_with_their_reward() -> None:
    async def main() -> None:
        engines = FakeEngines(4)
        runner = make_runner(make_context(engines))
        group = await runner.run(fresh_group(2))
        num_calls, before = len(engines.calls), [s.tokens.tolist() for s in group.samples]
        group.samples[0].reward = 0.25
        await runner.run(group)
        assert len(engines.calls) == num_calls
        assert group.samples[0].reward == 0.25
        assert [s.tokens.tolist() for s in group.samples] == before

    run(main)


def test_restarting_a_fanned_out_group_gives_back_the_samples_that_were_issued() -> None:
    async def main() -> None:
        async def reversed_ways(sample: Sample, context: GenerateContext) -> list[Sample]:
            return (await three_ways(sample, context))[::-1]

        group = await make_runner(make_context(), reversed_ways).run(fresh_group(2))
        group.samples[0].in_loss = False
        restart_group(group)
        assert [(s.index, s.attempt) for s in group.samples] == [(0, 0), (1, 1)]
        assert all(s.status is Status.PENDING and not s.segments for s in group.samples)
        assert all(s.in_loss and s.reward is None for s in group.samples)

    run(main)


@pytest.mark.parametrize("where", ["generate", "reward"])
def test_an_attempt_that_failed_for_good_ends_a_group_that_nobody_will_use(where: str) -> None:
    class Picky(LengthJudge):
        async def judge(self, sample: Sample) -> Outcome:
            if where == "reward" and sample.attempt == 1:
                raise RuntimeError("grader lost")
            return await super().judge(sample)

    async def main() -> None:
        engines = FakeEngines(4)
        engines.hold()
        context = make_context(engines)

        async def generate(sample: Sample, context: GenerateContext) -> Sample:
            if sample.attempt == 1:
                await until(lambda: engines.num_running == 2)
                if where == "generate":
                    raise ValueError("attempt 1 is broken")
                sample.status = Status.COMPLETED
                return sample
            return await context.extend(sample)

        runner = make_runner(context, generate, judge=Picky(), max_retries=0, ends_on_failure=True)
        group = await runner.run(fresh_group(3))
        assert [s.status for s in group.samples] == [
            Status.PENDING,
            Status.FAILED,
            Status.PENDING,
        ]
        assert engines.num_running == context.gate.num_inside == 0

    run(main)
