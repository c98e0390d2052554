"""The model of engines and graders: conservation, and times worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.plan.fleet import NEVER, Answer, Engine, Fleet


def run(engine: Engine) -> list[tuple[float, int]]:
    """Times and groups of all answers, until nothing runs."""
    done = []
    while (now := engine.next_finish()) < NEVER:
        done += [(now, answer.group) for answer in engine.advance(now)]
    return done


def fleet(*engines: Engine, max_requests: int = 1000, graders: int = 1, grade: float = 0) -> Fleet:
    return Fleet(list(engines), max_requests=max_requests, num_graders=graders, grade_s=grade)


def finish(world: Fleet) -> list[tuple[float, int]]:
    done = []
    while (now := world.next_event()) < NEVER:
        done += [(now, group) for group in world.advance(now)]
    return done


def test_answers_share_decoding_steps() -> None:
    engine = Engine((0.5, 0.25), places=8)
    engine.add(Answer(1, 2))
    engine.add(Answer(2, 4))
    # Two steps of two answers at 1.0 s, then two steps of one at 0.75 s.
    assert run(engine) == [(pytest.approx(2.0), 1), (pytest.approx(3.5), 2)]


def test_answers_wait_for_a_place_and_a_prompt_is_computed_first() -> None:
    engine = Engine((0.0, 1.0), places=1)
    engine.add(Answer(1, 2, prefill_s=0.5))
    engine.add(Answer(2, 1, prefill_s=0.25))
    assert run(engine) == [(pytest.approx(2.5), 1), (pytest.approx(3.75), 2)]


def test_a_slower_engine_takes_longer_and_a_held_one_never_ends() -> None:
    engine = Engine((1.0, 0.0), places=4)
    engine.add(Answer(1, 4))
    assert engine.advance(1.0) == []
    engine.speed = 0.5
    assert engine.next_finish() == pytest.approx(7.0)
    engine.advance(3.0)
    engine.speed = 0.0
    assert engine.next_finish() == NEVER
    engine.advance(10.0)
    engine.speed = 1.0
    assert engine.next_finish() == pytest.approx(12.0)
    assert engine.busy_s == pytest.approx(3.0), "held time is not busy time"


def test_graders_take_one_answer_each_in_turn() -> None:
    world = fleet(Engine((1.0, 0.0), 8), graders=2, grade=1.0)
    world.submit(0, [Answer(0, 1), Answer(0, 1), Answer(0, 1)])
    assert finish(world) == [(pytest.approx(3.0), 0)]


def test_the_limit_counts_requests() -> None:
    world = fleet(Engine((1.0, 0.0), 8), max_requests=2)
    world.submit(0, [Answer(0, 1)] * 2)
    world.submit(1, [Answer(1, 1)] * 2)
    assert finish(world) == [(pytest.approx(1.0), 0), (pytest.approx(2.0), 1)]


def test_an_abort_tells_what_each_group_has_and_lacks() -> None:
    world = fleet(Engine((1.0, 0.0), 2), max_requests=3, grade=100.0)
    world.submit(0, [Answer(0, 2), Answer(0, 5)])
    world.submit(1, [Answer(1, 3), Answer(1, 4)])
    world.advance(2.0)
    world.advance(3.0)
    first, second = world.abort()
    assert (first.group, first.written, first.rest) == (0, 5, [2])
    assert (second.group, second.written, sorted(second.rest)) == (1, 1, [2, 4])
    assert world.next_event() == NEVER
    assert world.num_written == 6


GROUPS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=12)


@given(
    groups=GROUPS,
    engines=st.integers(1, 3),
    places=st.integers(1, 8),
    limit=st.integers(1, 20),
    graders=st.integers(1, 3),
)
def test_every_group_ends_once_with_all_its_tokens(
    groups: list[list[int]], engines: int, places: int, limit: int, graders: int
) -> None:
    world = fleet(
        *(Engine((0.1, 0.01), places) for _ in range(engines)),
        max_requests=limit,
        graders=graders,
        grade=0.05,
    )
    for number, lengths in enumerate(groups):
        world.submit(number, [Answer(number, tokens) for tokens in lengths])
    done = finish(world)
    assert sorted(group for _, group in done) == list(range(len(groups)))
    assert [time for time, _ in done] == sorted(time for time, _ in done)
    total = sum(map(sum, groups))
    assert world.num_written == total
    alone = 0.11  # nothing is faster than its longest answer, or than all engines when full
    fastest = engines * places / (0.1 + 0.01 * places)
    assert done[-1][0] >= max(max(map(max, groups)) * alone, total / fastest) - 1e-6
