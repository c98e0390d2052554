"""Teachers in a rollout: who scores what and when, and what becomes of it when they fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy.typing as npt
import pytest
from rollout_helpers import LengthJudge, run, until

from rollmill.config.reward import RewardConfig
from rollmill.engine.errors import EngineTimeout
from rollmill.errors import RolloutError
from rollmill.rewards.outcome import OutcomeKind
from rollmill.rollout.fresh import afresh, is_done, is_taught
from rollmill.rollout.generate import generate_single_turn
from rollmill.rollout.group import GroupRunner
from rollmill.rollout.hooks import generate_overrides
from rollmill.rollout.teacher import Teachers, ZeroReward
from rollmill.sample import FloatArray, Group, Sample, Segment, Status, float_array, int_array
from rollmill.testing import FakeEngines, make_context


class CountingScorer:
    """Scores token i with −i/64: what belongs to which position shows. `hold` makes it wait."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.seen: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.num_waiting = 0

    async def score(
        self, rid: str, input_ids: npt.ArrayLike, start: int, *, session_id: str | None = None
    ) -> FloatArray:
        tokens = int_array(input_ids)
        self.seen.append(tokens.tolist())
        self.num_waiting += 1
        await self.open.wait()
        self.num_waiting -= 1
        return float_array([-self.factor * token / 64 for token in tokens[start:].tolist()])


class BrokenScorer(CountingScorer):
    async def score(
        self, rid: str, input_ids: npt.ArrayLike, start: int, *, session_id: str | None = None
    ) -> FloatArray:
        raise EngineTimeout("the teacher does not answer", where=rid)


def make_runner(
    teachers: Teachers, judge: LengthJudge | None = None, engines: FakeEngines | None = None
) -> GroupRunner:
    return GroupRunner(
        generate=generate_single_turn,
        overrides=generate_overrides(Path()),
        context=make_context(engines or FakeEngines()),
        judge=judge or LengthJudge(),
        reward=RewardConfig(),
        max_retries=0,
        teacher=teachers,
    )


def group_of(num: int = 2, **metadata: str) -> Group:
    samples = [
        Sample(prompt_tokens=int_array([5, 6, 7]), index=n, attempt=n, metadata=dict(metadata))
        for n in range(num)
    ]
    return Group(0, samples)


def expected(sample: Sample, factor: float = 1.0) -> list[float]:
    return float_array([-factor * t / 64 for t in sample.response_tokens.tolist()]).tolist()


def test_each_answer_is_scored_whole_and_by_position() -> None:
    scorer = CountingScorer()

    async def main() -> None:
        group = await make_runner(Teachers({"": scorer})).run(group_of())
        for sample in group.samples:
            assert is_done(sample)
            assert sample.teacher_log_probs is not None
            assert sample.teacher_log_probs.tolist() == expected(sample)
            assert sample.tokens.tolist() in scorer.seen

    run(main)


def test_the_row_names_its_teacher() -> None:
    teachers = Teachers({"": CountingScorer(1.0), "strict": CountingScorer(2.0)})

    async def main() -> None:
        runner = make_runner(teachers)
        for group, factor in ((group_of(), 1.0), (group_of(teacher="strict"), 2.0)):
            for sample in (await runner.run(group)).samples:
                assert sample.teacher_log_probs is not None
                assert sample.teacher_log_probs.tolist() == expected(sample, factor)

    run(main)


@pytest.mark.parametrize("metadata", [{"teacher": "nobody"}, {}])
def test_a_row_without_a_known_teacher_fails_with_the_names(metadata: dict[str, str]) -> None:
    async def main() -> None:
        runner = make_runner(Teachers({"strict": CountingScorer()}))
        for sample in (await runner.run(group_of(**metadata))).samples:
            assert sample.status is Status.FAILED
            assert str(sample.failure).startswith("teacher: RolloutError: no teacher for a row")

    run(main)


def test_a_teacher_that_fails_is_the_samples_failure_with_the_reason() -> None:
    async def main() -> None:
        group = await make_runner(Teachers({"": BrokenScorer()})).run(group_of())
        for sample in group.samples:
            assert sample.status is Status.FAILED
            assert sample.failure == "teacher: EngineTimeout: the teacher does not answer"

    run(main)


def test_an_answer_without_tokens_needs_no_teacher() -> None:
    scorer = CountingScorer()

    async def main() -> None:
        sample = Sample(prompt_tokens=int_array([5]), status=Status.TRUNCATED)
        await Teachers({"": scorer}).score(sample)
        assert is_taught(sample)
        assert scorer.seen == []

    run(main)


def test_scoring_begins_while_other_answers_are_still_written() -> None:
    scorer = CountingScorer()
    second_may_end: list[asyncio.Event] = []

    async def generate(sample: Sample, context: object) -> Sample:
        if sample.attempt == 1:
            await second_may_end[0].wait()
        sample.segments = [Segment.from_engine([9, 8], [-1.0, -1.0], 0)]
        sample.status = Status.COMPLETED
        return sample

    async def main() -> None:
        second_may_end.append(asyncio.Event())
        runner = replace(make_runner(Teachers({"": scorer})), generate=generate)
        group = group_of()
        task = asyncio.create_task(runner.run(group))
        first = group.samples[0]
        await until(lambda: is_taught(first))
        assert not task.done()
        second_may_end[0].set()
        await task
        assert all(is_done(sample) for sample in group.samples)

    run(main)


@pytest.mark.parametrize("reward", [None, 1.0])
def test_an_answer_caught_while_it_is_scored_is_not_done_and_is_only_scored_later(
    reward: float | None,
) -> None:
    scorer, judge = CountingScorer(), LengthJudge()

    async def generate(sample: Sample, context: object) -> Sample:
        assert not sample.segments, "an answer was written twice"
        sample.segments = [Segment.from_engine([9, 8], [-1.0, -1.0], 0)]
        sample.status = Status.COMPLETED
        sample.reward = reward
        return sample

    async def main() -> None:
        runner = replace(make_runner(Teachers({"": scorer}), judge), generate=generate)
        scorer.open.clear()
        group = group_of()
        task = asyncio.create_task(runner.run(group))
        await until(lambda: scorer.num_waiting == 2)
        runner.context.gate.close()
        await task
        assert [sample.status for sample in group.samples] == [Status.COMPLETED] * 2
        assert not any(map(is_done, group.samples))
        num_judged = judge.num_judged
        runner.context.gate.open()
        scorer.open.set()
        await runner.run(group)
        assert all(map(is_done, group.samples))
        assert all(map(is_taught, group.samples))
        assert judge.num_judged <= num_judged + 2

    run(main)


def test_a_fresh_start_forgets_what_the_teacher_said() -> None:
    sample = Sample(prompt_tokens=int_array([5]), teacher_log_probs=float_array([-1.0]))
    assert afresh(sample).teacher_log_probs is None


def test_without_a_reward_answers_get_zero_and_named_rewards_are_still_asked() -> None:
    judge = LengthJudge(score=lambda _: 0.5)

    async def main() -> None:
        zero = ZeroReward(judge)
        plain = Sample(prompt_tokens=int_array([5]))
        named = Sample(prompt_tokens=int_array([5]), metadata={"reward_type": "math"})
        null = Sample(prompt_tokens=int_array([5]), metadata={"reward_type": None})  # of a table
        outcomes = await zero.judge_group([plain, named, null])
        assert [(o.kind, o.reward) for o in outcomes] == [
            (OutcomeKind.VALUE, 0.0),
            (OutcomeKind.VALUE, 0.5),
            (OutcomeKind.VALUE, 0.0),
        ]

    run(main)


def test_unknown_teachers_are_named_in_the_error() -> None:
    teachers = Teachers({"a": CountingScorer(), "b": CountingScorer()})
    with pytest.raises(RolloutError, match="'c'") as error:
        teachers.name_for(Sample(prompt_tokens=int_array([5]), metadata={"teacher": "c"}))
    assert error.value.expected == "'a', 'b'"


def test_an_answer_about_images_fails_before_a_teacher_guesses_without_them() -> None:
    """A generate function of the user's may send images; teachers are sent tokens only."""
    scorer = CountingScorer()

    async def main() -> None:
        sample = Sample(
            prompt_tokens=int_array([5, 6]),
            segments=[Segment.from_engine([7], [-0.5], 0)],
            multimodal_inputs={"images": ["a.png"]},
            status=Status.COMPLETED,
        )
        with pytest.raises(RolloutError, match="has images"):
            await Teachers({"": scorer}).score(sample)
        assert scorer.seen == []

    run(main)
