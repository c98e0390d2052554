"""The books: one state per group, nothing trained twice, and any position can be gone back to."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.data.ledger import FINAL, FLUSH_EVENTS, NEXT, Ledger, State
from rollmill.data.ledger_report import read_history, read_report
from rollmill.errors import LedgerError


def walk(ledger: Ledger, group: int, *states: State, step: int = 1) -> None:
    for state in states:
        ledger.record(group, state, step=step, num_tokens=7)


TRAINED = (State.ISSUED, State.IN_FLIGHT, State.READY, State.CONSUMED)


def test_a_group_moves_through_its_states_and_the_balance_follows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    walk(ledger, 0, *TRAINED)
    walk(ledger, 1, State.ISSUED, State.IN_FLIGHT, State.WAITING)
    walk(ledger, 2, State.ISSUED, State.IN_FLIGHT)
    ledger.record(2, State.REJECTED, reason="zero_std_1")
    counts = {state: count for state, count in ledger.balance().items() if count}
    assert counts == {State.CONSUMED: 1, State.WAITING: 1, State.REJECTED: 1}
    assert ledger.live() == {1: State.WAITING}


@pytest.mark.parametrize("again", list(State))
@pytest.mark.parametrize("final", sorted(FINAL))
def test_a_final_group_can_never_come_back(tmp_path: Path, final: State, again: State) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first = TRAINED[:-1] if final is State.CONSUMED else TRAINED[:-2]
    walk(ledger, 5, *first, final)
    before = ledger.balance()
    with pytest.raises(LedgerError, match=f"group 5 cannot become {again}"):
        ledger.record(5, again)
    assert ledger.balance() == before


def test_the_same_holds_after_the_file_was_opened_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    walk(ledger, 5, *TRAINED)
    ledger.close()
    with pytest.raises(LedgerError):
        Ledger(tmp_path / "ledger.sqlite").record(5, State.ISSUED)


def test_going_back_undoes_what_came_after_and_keeps_the_story(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    walk(ledger, 0, *TRAINED)
    walk(ledger, 1, State.ISSUED, State.IN_FLIGHT, State.READY)
    position = ledger.position()
    walk(ledger, 1, State.CONSUMED, step=2)
    walk(ledger, 2, *TRAINED, step=2)
    assert ledger.rewind(position) == 5
    assert ledger.live() == {1: State.READY}
    assert ledger.state_of(2) is None
    walk(ledger, 1, State.CONSUMED, step=2)
    ledger.flush()
    story = [(event.state, event.is_undone) for event in read_history(path, 1)]
    assert story[-2:] == [(State.CONSUMED, True), (State.CONSUMED, False)]
    assert read_report(path).num_consumed_by_step == {1: 1, 2: 1}


def test_a_position_that_was_never_reached_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    walk(ledger, 0, State.ISSUED)
    with pytest.raises(LedgerError, match="at least 7 events"):
        ledger.rewind(7)


def test_a_position_covers_everything_recorded_before_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    walk(ledger, 0, State.ISSUED, State.IN_FLIGHT)
    assert ledger.position() == 2
    report = read_report(tmp_path / "ledger.sqlite")  # another connection sees it
    assert report.balance[State.IN_FLIGHT] == 1
    assert report.num_issued == 1


def test_what_cannot_be_written_is_an_error_and_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger._db.execute("PRAGMA busy_timeout=0")
    walk(ledger, 0, State.ISSUED)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="cannot be written: database is locked"):
        ledger.flush()
    other.execute("ROLLBACK")
    walk(ledger, 0, State.IN_FLIGHT)
    ledger.flush()
    assert [event.state for event in read_history(path, 0)] == [State.ISSUED, State.IN_FLIGHT]


def test_what_the_writing_thread_cannot_write_is_an_error_and_is_written_later_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.data.ledger.FLUSH_SECONDS", 1e9)  # by their number only
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger._db.execute("PRAGMA busy_timeout=0")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for group in range(FLUSH_EVENTS):  # the last one is handed over with all before it
        walk(ledger, group, State.ISSUED)
    walk(ledger, 0, State.IN_FLIGHT)
    with pytest.raises(LedgerError, match="cannot be written: database is locked"):
        ledger.flush()
    other.execute("ROLLBACK")
    walk(ledger, 0, State.READY)
    assert ledger.position() == FLUSH_EVENTS + 2
    states = [event.state for event in read_history(path, 0)]
    assert states == [State.ISSUED, State.IN_FLIGHT, State.READY]
    ledger.close()


def test_reasons_are_counted_for_readers(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for group, reason in enumerate(["zero_std_0", "zero_std_0", "zero_std_1"]):
        walk(ledger, group, State.ISSUED, State.IN_FLIGHT)
        ledger.record(group, State.REJECTED, reason=reason)
    ledger.close()
    assert read_report(tmp_path / "ledger.sqlite").reasons == [
        (State.REJECTED, "zero_std_0", 2),
        (State.REJECTED, "zero_std_1", 1),
    ]


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"something else entirely, and long enough to be no empty database")
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(path)
    with pytest.raises(LedgerError, match="cannot be read"):
        read_report(path)
    with pytest.raises(LedgerError, match="no ledger"):
        read_report(tmp_path / "nothing.sqlite")


def test_a_run_folder_with_special_characters_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run #1 100%?" / "ledger.sqlite"
    ledger = Ledger(path)
    walk(ledger, 0, State.ISSUED)
    ledger.close()
    assert read_report(path).num_issued == 1


STEPS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(State))), max_size=80)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, marks=st.lists(st.integers(0, 80), max_size=3), reopen=st.booleans())
def test_the_balance_is_the_count_of_states_after_every_event_and_every_return(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, State]],
    marks: list[int],
    reopen: bool,
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    ledger = Ledger(path)
    model: dict[int, State] = {}
    saved: list[tuple[int, dict[int, State]]] = []

    def check() -> None:
        balance = ledger.balance()
        assert sum(balance.values()) == len(model)
        assert balance == {s: list(model.values()).count(s) for s in State}
        assert ledger.live() == {g: s for g, s in model.items() if s not in FINAL}

    for number, (group, state) in enumerate(steps):
        if number in marks:
            saved.append((ledger.position(), dict(model)))
        if state in NEXT[model.get(group)]:
            ledger.record(group, state)
            model[group] = state
        else:
            with pytest.raises(LedgerError):
                ledger.record(group, state)
        check()
    for position, then in reversed(saved):
        if reopen:
            ledger.close()
            ledger = Ledger(path)
        ledger.rewind(position)
        model = then
        check()
    ledger.close()
