from __future__ import annotations

import random

import pytest

from rollmill.engine.http import error_message
from rollmill.engine.retry import LONGEST_DELAY_S, Throttle, Verdict, backoff_delay, judge_status


@pytest.mark.parametrize(
    "status, verdict",
    [
        (200, Verdict.DONE),
        (204, Verdict.DONE),
        (400, Verdict.REFUSED),
        (404, Verdict.REFUSED),
        (422, Verdict.REFUSED),
        (429, Verdict.BUSY),
        (500, Verdict.FAILED),
        (501, Verdict.FAILED),
        (502, Verdict.BROKEN_GATEWAY),
        (503, Verdict.BUSY),
        (504, Verdict.BROKEN_GATEWAY),
        (302, Verdict.FAILED),
    ],
)
def test_what_a_status_means(status: int, verdict: Verdict) -> None:
    assert judge_status(status) is verdict


def test_delays_double_with_up_to_half_taken_off_and_are_capped() -> None:
    draw = random.Random(0)
    for attempt, longest in enumerate([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]):
        delays = [backoff_delay(attempt, draw) for _ in range(100)]
        assert longest / 2 <= min(delays)
        assert max(delays) <= longest
        assert len(set(delays)) > 90
    assert backoff_delay(10**6, draw) <= LONGEST_DELAY_S


def test_a_busy_engine_holds_everybody_back_until_it_serves() -> None:
    draw = random.Random(0)
    throttle = Throttle()
    assert throttle.wait_s(100.0) == 0.0
    first = throttle.busy(100.0, draw)
    assert throttle.wait_s(100.0) == pytest.approx(first)
    second = throttle.busy(100.0, draw)
    assert second > first
    assert throttle.wait_s(100.0 + second) == pytest.approx(0.0)
    throttle.busy(100.0, draw)
    throttle.served()
    assert throttle.wait_s(100.0) == 0.0


def test_the_engines_own_wish_is_kept_within_bounds() -> None:
    draw = random.Random(0)
    assert Throttle().busy(0.0, draw, retry_after_s=3.0) == 3.0
    assert Throttle().busy(0.0, draw, retry_after_s=3600.0) == LONGEST_DELAY_S


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"error":{"message":"top_p must be in (0, 1]"}}', "top_p must be in (0, 1]"),
        (b'{"error":"unknown field `x`"}', "unknown field `x`"),
        (b'{"object":"error","message":"1 validation error","code":400}', "1 validation error"),
        (b'{"success":false,"message":"Failed to get weights"}', "Failed to get weights"),
        (b'{"detail":"Not Found"}', "{'detail': 'Not Found'}"),
        (b"Flush cache failed.\n", "Flush cache failed."),
        (b"", "(no message)"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 5000, "x" * 500),
    ],
)
def test_the_message_is_found_in_every_shape_of_error(body: bytes, message: str) -> None:
    assert error_message(body) == message
