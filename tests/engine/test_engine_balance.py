from __future__ import annotations

from rollmill.engine.balance import Balancer


def test_a_request_without_session_goes_to_the_least_loaded_engine() -> None:
    assert Balancer().choose({0: 50, 1: 10, 2: 30}, None, 5) == 1
    assert Balancer().choose({2: 10, 1: 10}, None, 5) == 1  # ties: the lowest number


def test_a_session_stays_on_its_engine_while_it_is_not_overloaded() -> None:
    balancer = Balancer(slack=4)
    assert balancer.choose({0: 0, 1: 0}, "group", 10) == 0
    assert balancer.choose({0: 40, 1: 0}, "group", 10) == 0
    assert balancer.choose({0: 41, 1: 0}, "group", 10) == 1
    assert balancer.choose({0: 41, 1: 60}, "group", 10) == 1  # and stays there


def test_a_session_moves_when_its_engine_is_gone() -> None:
    balancer = Balancer()
    assert balancer.choose({0: 0, 1: 5}, "group", 10) == 0
    assert balancer.choose({1: 5}, "group", 10) == 1
    assert balancer.choose({0: 0, 1: 5}, "group", 10) == 1


def test_old_sessions_are_forgotten() -> None:
    balancer = Balancer(max_sessions=2)
    for name in ("a", "b", "c"):
        balancer.choose({0: 0, 1: 0}, name, 1)
    assert balancer.choose({0: 9, 1: 0}, "c", 1) == 0  # remembered
    assert balancer.choose({0: 9, 1: 0}, "a", 1) == 1  # forgotten
