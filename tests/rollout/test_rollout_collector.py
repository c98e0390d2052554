"""The collector: batch sizes exact, books balanced after every event, an end to every batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import RolloutError
from rollmill.filters import KEEP, Verdict
from rollmill.rollout.collector import CollectLimits, Collector, Decision
from rollmill.sample import Group

LIMITS = CollectLimits(
    target=4,
    submit_size=4,
    max_consecutive_rejections=100,
    max_refills=100,
    when_short="error",
    max_failure_rate=0.5,
    filter_name="nonzero_std",
)
NO = Verdict(False, "zero_std")


def group(number: int) -> Group:
    return Group(number, [])


def submit(collector: Collector) -> int:
    number = collector.num_to_submit()
    collector.submitted(number)
    return number


def feed(collector: Collector, verdicts: Iterable[Verdict | str]) -> None:
    """Submit what is asked for and let one group after the other end; text is a failure."""
    for number, verdict in enumerate(verdicts):
        submit(collector)
        if isinstance(verdict, str):
            collector.failed_group(group(number), verdict)
        else:
            collector.finished(group(number), verdict)


def check_balance(collector: Collector) -> None:
    assert sum(collector.balance().values()) == collector.num_submitted
    assert min(collector.balance().values()) >= 0


def test_a_batch_is_full_after_exactly_its_size_and_later_groups_are_surplus() -> None:
    collector = Collector(replace(LIMITS, submit_size=6))
    assert submit(collector) == 6
    decisions = [collector.finished(group(i), KEEP) for i in range(6)]
    assert decisions == [Decision.ACCEPT] * 4 + [Decision.SURPLUS] * 2
    assert [g.group_index for g in collector.accepted] == [0, 1, 2, 3]
    assert collector.num_to_submit() == 0


def test_a_refill_is_asked_for_only_when_the_batch_cannot_be_filled_any_more() -> None:
    collector = Collector(replace(LIMITS, submit_size=6))
    submit(collector)
    assert [collector.finished(group(i), NO) for i in range(2)] == [Decision.REJECT] * 2
    assert collector.num_to_submit() == 0  # four are still in flight
    collector.finished(group(2), NO)
    assert collector.num_to_submit() == 6


def test_ready_groups_count_towards_the_batch_and_need_no_submission() -> None:
    collector = Collector(LIMITS)
    for number in range(5):
        collector.offer_ready(group(number))
    assert collector.is_done
    assert [g.group_index for g in collector.surplus] == [4]
    check_balance(collector)


def test_a_filter_that_rejects_everything_ends_with_its_name_and_the_reasons() -> None:
    collector = Collector(replace(LIMITS, max_consecutive_rejections=6))
    with pytest.raises(RolloutError) as caught:
        feed(collector, [NO if number % 3 else Verdict(False, "too_long") for number in range(100)])
    assert "nonzero_std rejected 6 groups in a row" in str(caught.value)
    assert "4 × zero_std, 2 × too_long; accepted so far: 0 of 4" in str(caught.value)


def test_one_kept_group_starts_the_count_of_rejections_anew() -> None:
    collector = Collector(replace(LIMITS, max_consecutive_rejections=3))
    feed(collector, [NO, NO, KEEP, NO, NO, KEEP])
    assert len(collector.accepted) == 2


def test_refills_are_limited_though_some_groups_pass() -> None:
    collector = Collector(replace(LIMITS, target=50, submit_size=50, max_refills=3))
    with pytest.raises(RolloutError, match="3 refills did not fill the batch"):
        feed(collector, [KEEP if number % 20 == 0 else NO for number in range(1000)])


@pytest.mark.parametrize("limit", ["max_consecutive_rejections", "max_refills"])
def test_when_short_keep_fills_the_batch_with_the_oldest_rejected_groups(limit: str) -> None:
    limits = replace(LIMITS, when_short="keep", **{limit: 2})
    collector = Collector(limits)
    number = 0
    while not collector.is_done:
        submit(collector)
        if not collector.is_done:
            collector.finished(group(number), NO)
            number += 1
        check_balance(collector)
    assert [g.group_index for g in collector.accepted] == [0, 1, 2, 3]
    assert collector.reasons["zero_std"] == len(collector.rejected) == number - 4


def test_too_many_failures_end_with_the_reasons_counted() -> None:
    collector = Collector(LIMITS)
    with pytest.raises(RolloutError) as caught:
        feed(collector, ["engine down"] * 100)
    assert "8 of the last 8 groups failed" in str(caught.value)
    assert "8 × engine down" in str(caught.value)


def test_cutting_to_the_ranked_groups_keeps_the_books_balanced() -> None:
    for reason in (None, "over_sampling_rank"):
        collector = Collector(LIMITS)
        submit(collector)
        groups = [group(i) for i in range(4)]
        for each in groups:
            collector.finished(each, KEEP)
        collector.cut([groups[3], groups[1]], reject_rest=reason)
        check_balance(collector)
        assert collector.accepted == [groups[1], groups[3]]
        rest = collector.surplus if reason is None else [g for g, _ in collector.rejected]
        assert rest == [groups[0], groups[2]]


EVENTS = st.lists(st.sampled_from(["keep", "reject", "fail", "return"]), max_size=120)


@settings(max_examples=200, deadline=None)
@given(
    events=EVENTS,
    target=st.integers(1, 6),
    extra=st.integers(0, 6),
    ready=st.integers(0, 9),
    keeps=st.booleans(),
)
def test_books_balance_after_every_event_and_batches_are_exact(
    events: list[str], target: int, extra: int, ready: int, keeps: bool
) -> None:
    limits = replace(
        LIMITS,
        target=target,
        submit_size=target + extra,
        max_consecutive_rejections=5,
        max_refills=20,
        when_short="keep" if keeps else "error",
        max_failure_rate=1.0,
    )
    collector = Collector(limits)
    number = 0
    for number in range(ready):
        collector.offer_ready(group(number))
        check_balance(collector)
    seen: list[int] = list(range(ready))
    try:
        for event in events:
            submit(collector)
            check_balance(collector)
            assert len(collector.accepted) <= target
            if collector.is_done and not collector.num_in_flight:
                break
            assert collector.num_in_flight > 0  # there is always something to wait for
            number += 1
            if event == "return":
                collector.returned()
            elif event == "fail":
                collector.failed_group(group(number), "broken")
            else:
                collector.finished(group(number), KEEP if event == "keep" else NO)
            seen.append(number)
            check_balance(collector)
    except RolloutError:
        assert not keeps
        check_balance(collector)
    known = [
        *(g.group_index for g in (*collector.accepted, *collector.surplus)),
        *(g.group_index for g, _ in (*collector.rejected, *collector.failed)),
    ]
    assert len(known) == len(set(known))
    assert len(known) + collector.num_returned <= len(seen) + 1
    assert collector.is_done == (len(collector.accepted) == target)
