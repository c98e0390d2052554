"""The staleness bound, by example and over random schedules."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.rollout.staleness import StalenessGate


def admit_all(gate: StalenessGate, first: int) -> list[int]:
    groups = list(range(first, first + gate.num_to_admit()))
    for group in groups:
        gate.admit(group)
    return groups


def test_on_policy_admits_one_batch_and_nothing_while_it_is_trained() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=0)
    assert admit_all(gate, 0) == [0, 1]
    gate.finish(1)
    assert gate.take_batch() is None
    gate.finish(0)
    assert gate.take_batch() == [0, 1]
    assert gate.num_to_admit() == 0
    gate.trained(1)
    assert gate.num_to_admit() == 2


def test_one_step_off_writes_the_next_batch_while_one_is_trained() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=1)
    assert admit_all(gate, 0) == [0, 1, 2, 3]
    for group in (1, 2):
        gate.finish(group)
    assert gate.take_batch() == [1, 2], "no deadline yet: finished groups need not wait"
    assert gate.num_to_admit() == 0
    gate.trained(1)
    assert admit_all(gate, 4) == [4, 5]
    for group in (4, 5):
        gate.finish(group)
    assert gate.take_batch() is None, "0 and 3 were written by version 0 and are due at step 2"
    gate.finish(0)
    assert gate.take_batch() is None
    gate.finish(3)
    assert gate.take_batch() == [0, 3]


def test_gone_groups_make_room_for_new_ones() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=0)
    admit_all(gate, 0)
    gate.drop(0)
    assert admit_all(gate, 2) == [2]
    gate.finish(1)
    gate.finish(2)
    assert gate.take_batch() == [1, 2]


def test_impossible_events_are_refused() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0)
    gate.admit(0)
    with pytest.raises(ValueError, match="live already"):
        gate.admit(0)
    with pytest.raises(ValueError, match="may be admitted"):
        gate.admit(1)
    with pytest.raises(ValueError, match="expected a version from 0 to 0"):
        gate.trained(1)


@settings(max_examples=300, deadline=None)
@given(
    batch_size=st.integers(1, 4),
    bound=st.integers(0, 4),
    events=st.lists(st.tuples(st.sampled_from("afdtv"), st.integers(0, 20)), max_size=150),
)
def test_no_schedule_trains_a_group_past_the_bound(
    batch_size: int, bound: int, events: list[tuple[str, int]]
) -> None:
    gate = StalenessGate(batch_size=batch_size, max_staleness=bound)
    admitted_at: dict[int, int] = {}
    flying: list[int] = []
    used: set[int] = set()
    next_group, steps_taken, version = 0, 0, 0
    for event, number in events:
        if event == "a":
            for _ in range(min(number, gate.num_to_admit())):
                gate.admit(next_group)
                admitted_at[next_group] = version
                flying.append(next_group)
                next_group += 1
        elif event in "fd" and flying:
            group = flying.pop(number % len(flying))
            (gate.finish if event == "f" else gate.drop)(group)
        elif event == "t" and steps_taken == version:
            batch = gate.take_batch()
            if batch is not None:
                steps_taken += 1
                assert len(batch) == batch_size
                assert used.isdisjoint(batch)
                assert batch == sorted(batch), "in order of admission"
                used.update(batch)
                assert max(steps_taken - 1 - admitted_at[g] for g in batch) <= bound
        elif event == "v" and steps_taken > version:
            version += 1
            gate.trained(version)
    # Whatever happened: when everything in flight finishes, training goes on.
    for group in flying:
        gate.finish(group)
    if steps_taken > version:
        gate.trained(steps_taken)
    while gate.num_to_admit():
        gate.admit(next_group)
        gate.finish(next_group)
        next_group += 1
    assert gate.take_batch() is not None


@settings(max_examples=200, deadline=None)
@given(
    batch_size=st.integers(1, 4),
    bound=st.integers(0, 4),
    version=st.integers(0, 6),
    ages=st.lists(st.integers(0, 8), max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_whatever_an_earlier_process_left_the_bound_holds_and_training_goes_on(
    batch_size: int, bound: int, version: int, ages: list[int], order: random.Random
) -> None:
    last_step = version + 6
    gate = StalenessGate(
        batch_size=batch_size, max_staleness=bound, version=version, last_step=last_step
    )
    oldest: dict[int, int] = {}
    for group, age in enumerate(sorted(ages, reverse=True)):
        if gate.restore(group, version - age):
            oldest[group] = version - age
    assert len(oldest) <= (bound + 1) * batch_size
    next_group, flying = len(ages), []
    for step in range(version + 1, last_step + 1):
        for _ in range(gate.num_to_admit()):
            gate.admit(next_group)
            oldest[next_group] = version
            flying.append(next_group)
            next_group += 1
        order.shuffle(flying)
        while (batch := gate.take_batch()) is None:
            gate.finish(flying.pop())  # fails when nothing is left: then it would wait for ever
        assert len(batch) == batch_size
        assert max(step - 1 - oldest.pop(group) for group in batch) <= bound
        version = step
        gate.trained(step)
    assert gate.num_to_admit() == 0
    assert len(oldest) <= max(0, len(ages)), "nothing was admitted that no step needs"
