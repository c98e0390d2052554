from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmill.engine.health import LONGEST_RESTART_DELAY_S, EngineHealth, Phase


def ready_engine(max_strikes: int = 3, max_restarts: int | None = 2) -> EngineHealth:
    health = EngineHealth(max_strikes=max_strikes, max_restarts=max_restarts)
    health.starting()
    health.answered()
    health.current()
    return health


def test_an_engine_takes_requests_only_after_it_answered_and_has_the_weights() -> None:
    health = EngineHealth(max_strikes=3, max_restarts=2)
    assert not health.takes_requests
    health.starting()
    assert (health.phase, health.takes_requests) == (Phase.STARTING, False)
    health.answered()
    assert (health.phase, health.takes_requests) == (Phase.STALE, False)
    health.current()
    assert (health.phase, health.takes_requests) == (Phase.READY, True)


def test_one_failed_check_stops_new_requests_but_kills_nothing() -> None:
    health = ready_engine()
    health.silent(1.0, "slow")
    assert (health.phase, health.takes_requests) == (Phase.READY, False)
    health.answered()
    assert health.takes_requests


def test_strikes_in_a_row_kill_and_an_answer_between_them_forgives() -> None:
    health = ready_engine()
    for _ in range(5):
        health.silent(1.0, "slow")
        health.silent(2.0, "slow")
        health.answered()
    assert health.phase is Phase.READY
    for now in (3.0, 4.0, 5.0):
        health.silent(now, "slow")
    assert health.phase is Phase.DEAD
    assert health.reason == "slow"


def test_failed_checks_while_starting_are_no_strikes() -> None:
    health = EngineHealth(max_strikes=1, max_restarts=2)
    health.starting()
    health.silent(1.0, "compiling")
    assert health.phase is Phase.STARTING


def test_starts_that_fail_in_a_row_give_the_engine_up_with_growing_delays() -> None:
    health = EngineHealth(max_strikes=3, max_restarts=2)
    delays = []
    while health.phase is not Phase.GIVEN_UP:
        health.starting()
        health.lost(10.0, "crashed")
        delays.append(health.restart_delay_s(10.0))
    assert delays == [1.0, 2.0, 2.0]  # the last start has no delay of its own
    assert health.num_deaths == 3


def test_an_engine_that_dies_right_after_every_start_is_given_up() -> None:
    health = EngineHealth(max_strikes=3, max_restarts=2)
    for _ in range(3):
        health.starting()
        health.answered()
        health.current()
        health.lost(1.0, "crashed")
    assert health.phase is Phase.GIVEN_UP


def test_an_engine_that_served_well_in_between_is_started_again_and_again() -> None:
    health = EngineHealth(max_strikes=3, max_restarts=0)
    for _ in range(10):
        health.starting()
        health.answered()
        health.current()
        health.answered()  # a check while ready
        health.lost(1.0, "killed")
        assert health.phase is Phase.DEAD


def test_attached_engines_are_never_given_up() -> None:
    health = EngineHealth(max_strikes=1, max_restarts=None)
    for _ in range(100):
        health.starting()
        health.lost(0.0, "gone")
    assert health.phase is Phase.DEAD
    assert health.restart_delay_s(0.0) == LONGEST_RESTART_DELAY_S


def test_an_outdated_engine_gets_no_requests_until_it_is_current() -> None:
    health = ready_engine()
    health.outdated("restarted behind our back")
    assert (health.phase, health.takes_requests) == (Phase.STALE, False)
    health.current()
    assert health.takes_requests


EVENTS = ("starting", "answered", "current", "outdated", "doubted", "silent", "lost")


@given(st.lists(st.sampled_from(EVENTS)), st.integers(1, 3), st.none() | st.integers(0, 2))
def test_requests_only_ever_go_to_engines_that_became_current_since_their_last_start(
    events: list[str], max_strikes: int, max_restarts: int | None
) -> None:
    health = EngineHealth(max_strikes=max_strikes, max_restarts=max_restarts)
    is_current = False
    for event in events:
        if event == "starting":
            if health.phase is not Phase.DEAD:
                continue
            health.starting()
        elif event in ("answered", "current"):
            is_current |= event == "current" and health.phase is Phase.STALE
            getattr(health, event)()
        elif event in ("outdated", "doubted"):
            getattr(health, event)("because")
        else:
            getattr(health, event)(1.0, "because")
        if health.phase in (Phase.DEAD, Phase.STARTING, Phase.STALE, Phase.GIVEN_UP):
            is_current = False
        assert health.takes_requests <= is_current
        assert 0 <= health.strikes < max_strikes
        if max_restarts is None:
            assert health.phase is not Phase.GIVEN_UP
