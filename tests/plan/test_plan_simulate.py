"""Simulated runs: what must hold whatever the figures, and one step worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.plan.assumptions import Assumptions
from rollmill.plan.schedule import Schedule, mean_of
from rollmill.plan.simulate import simulate

SPEEDS = Assumptions(
    response_tokens=40,
    tokens_per_second=100,
    tokens_per_second_alone=20,
    train_tokens_per_second=300,
    sync_s=0.5,
    other_s=0.1,
    grade_s=0.01,
)
SMALL = Schedule(batch_size=4, num_answers=3, max_new_tokens=128, submit_size=4, places=8)


def test_a_synchronous_step_by_hand() -> None:
    speeds = replace(SPEEDS, lengths=((10, 10),), grade_s=0.25, accepted_share=1.0)
    schedule = Schedule(batch_size=1, num_answers=2, max_new_tokens=8, submit_size=1, places=2)
    # Alone 1/20 s per token, two at once 2/100 s: with b < 0 the line is flat at 1/20.
    step = simulate(schedule, speeds, num_steps=1)[0]
    assert step.rollout_s == pytest.approx(8 / 20 + 2 * 0.25), "cut at max_new_tokens, one grader"
    assert step.train_s == pytest.approx(16 / 300)
    assert step.seconds == pytest.approx(0.9 + 16 / 300 + 0.5 + 0.1)
    assert step.engines_idle == pytest.approx(1 - 0.4 / step.seconds)
    assert (step.tokens, step.written, step.max_staleness) == (16, 16, 0)


schedules = st.builds(
    Schedule,
    batch_size=st.integers(1, 5),
    num_answers=st.integers(1, 4),
    max_new_tokens=st.just(128),
    submit_size=st.just(5),
    num_engines=st.integers(1, 3),
    places=st.integers(1, 8),
    max_requests=st.integers(1, 16),
    num_graders=st.integers(1, 2),
)
shares = st.sampled_from([1.0, 0.7, 0.25])


@given(schedule=schedules, seed=st.integers(0, 9))
def test_a_bound_of_0_is_synchronous_training(schedule: Schedule, seed: int) -> None:
    schedule = replace(schedule, submit_size=schedule.batch_size)
    speeds = replace(SPEEDS, other_s=0.0)
    one = simulate(schedule, speeds, num_steps=4, seed=seed)
    other = simulate(replace(schedule, max_staleness=0), speeds, num_steps=4, seed=seed)
    for a, b in zip(one, other, strict=True):
        assert a.seconds == pytest.approx(b.seconds)
        assert a.rollout_s == pytest.approx(b.rollout_s)
        assert (a.tokens, a.max_staleness) == (b.tokens, b.max_staleness)


@given(schedule=schedules, bound=st.integers(1, 4), share=shares, contention=st.floats(1, 3))
def test_staleness_stays_within_the_bound(
    schedule: Schedule, bound: int, share: float, contention: float
) -> None:
    speeds = replace(SPEEDS, accepted_share=share, contention=contention)
    steps = simulate(replace(schedule, max_staleness=bound), speeds, num_steps=8)
    assert max(step.max_staleness for step in steps) <= bound
    for step in steps:
        assert step.train_s >= speeds.train_seconds(int(step.tokens)) - 1e-9
        assert step.seconds >= step.rollout_s + step.train_s + step.sync_s - 1e-9
        assert 0 <= step.engines_idle <= 1


@given(schedule=schedules, share=shares, bound=st.sampled_from([None, 1, 2]))
def test_twice_as_fast_takes_half_the_time(
    schedule: Schedule, share: float, bound: int | None
) -> None:
    speeds = replace(SPEEDS, accepted_share=share, prefill_tokens_per_second=1000.0)
    twice = replace(
        speeds,
        tokens_per_second=2 * speeds.tokens_per_second,
        tokens_per_second_alone=2 * speeds.tokens_per_second_alone,
        prefill_tokens_per_second=2000.0,
        train_tokens_per_second=2 * speeds.train_tokens_per_second,
        sync_s=speeds.sync_s / 2,
        other_s=speeds.other_s / 2,
        grade_s=speeds.grade_s / 2,
    )
    schedule = replace(schedule, max_staleness=bound)
    one, half = (mean_of(simulate(schedule, s, num_steps=6)) for s in (speeds, twice))
    assert half.seconds == pytest.approx(one.seconds / 2, rel=1e-6)
    assert half.engines_idle == pytest.approx(one.engines_idle, abs=1e-6)


def test_unfinished_answers_cost_nothing_when_they_are_gone_on_with() -> None:
    greedy = replace(SMALL, submit_size=8)
    fresh, kept = (
        mean_of(simulate(replace(greedy, is_partial=partial), SPEEDS, num_steps=40))
        for partial in (False, True)
    )
    assert fresh.written > 1.15 * fresh.tokens, "what was aborted is thrown away"
    assert kept.written == pytest.approx(kept.tokens, rel=0.1)
    assert kept.rollout_s < fresh.rollout_s


def test_running_ahead_hides_the_faster_side() -> None:
    schedule = replace(SMALL, batch_size=16, submit_size=16)
    apart = mean_of(simulate(schedule, SPEEDS, num_steps=20))
    ahead = mean_of(simulate(replace(schedule, max_staleness=1), SPEEDS, num_steps=20))
    shared = mean_of(
        simulate(replace(schedule, max_staleness=1), replace(SPEEDS, contention=2.0), num_steps=20)
    )
    fewest = max(apart.train_s, apart.tokens / SPEEDS.tokens_per_second)
    assert 0.95 * fewest <= ahead.seconds < 0.8 * apart.seconds
    assert shared.seconds > 0.9 * apart.seconds, "on shared cores there is nothing to win"
    assert ahead.engines_idle < apart.engines_idle


def test_filters_cost_what_they_turn_down() -> None:
    half = replace(SPEEDS, accepted_share=0.5)
    schedule = replace(SMALL, max_staleness=2)
    mean = mean_of(simulate(schedule, half, num_steps=60))
    assert mean.tokens / mean.written == pytest.approx(0.5, abs=0.05)
