"""Reading the books of a run, from any process and also while the run writes them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollmill.data.ledger import State
from rollmill.errors import LedgerError


@dataclass(frozen=True, slots=True)
class Event:
    """One change of state.

    Attributes:
        seq: its number; a position is the number of the last event.
        state: the state it led to.
        step: the training step during which it happened.
        reason: why, for rejected and failed.
        num_tokens: response tokens the group had.
        time: seconds since the epoch.
        is_undone: a resume went back to before this event.
    """

    seq: int
    state: State
    step: int | None
    reason: str | None
    num_tokens: int
    time: float
    is_undone: bool


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """What a reader sees of a ledger.

    Attributes:
        balance: groups by state.
        reasons: (state, reason, count) of rejected and failed groups.
        num_consumed_by_step: groups trained at each step.
    """

    balance: dict[State, int]
    reasons: list[tuple[State, str, int]]
    num_consumed_by_step: dict[int, int]

    @property
    def num_issued(self) -> int:
        """All groups ever issued: the sum over states."""
        return sum(self.balance.values())


def read_report(path: Path) -> LedgerReport:
    """The balance of a ledger file, also while the run writes it.

    Raises:
        LedgerError: there is no ledger at `path`.
    """
    with _reading(path) as db:
        counts = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        reasons = db.execute(
            "SELECT state, COALESCE(reason, ''), COUNT(*) FROM groups "
            "WHERE state IN ('rejected', 'failed') GROUP BY 1, 2 ORDER BY 3 DESC"
        ).fetchall()
        steps = db.execute(
            "SELECT step, COUNT(*) FROM groups WHERE state = 'consumed' GROUP BY step ORDER BY step"
        ).fetchall()
    balance = {state: int(counts.get(state.value, 0)) for state in State}
    return LedgerReport(balance, [(State(s), r, c) for s, r, c in reasons], dict(steps))


def read_history(path: Path, group_index: int) -> list[Event]:
    """Everything that happened to one group, undone events included.

    Raises:
        LedgerError: there is no ledger at `path`.
    """
    with _reading(path) as db:
        rows = db.execute(
            "SELECT seq, state, step, reason, num_tokens, time, undone FROM events "
            "WHERE group_index = ? ORDER BY seq",
            (group_index,),
        ).fetchall()
    return [Event(r[0], State(r[1]), r[2], r[3], r[4], r[5], bool(r[6])) for r in rows]


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One consistent view of the file."""
    if not path.is_file():
        raise LedgerError(
            "there is no ledger",
            where=str(path),
            expected="a run folder with ledger.sqlite",
            fix="give the folder of a run (run.dir), or one that has begun",
        )
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            db.execute("BEGIN")
            yield db
        finally:
            db.close()
    except sqlite3.Error as error:
        raise LedgerError(
            f"the ledger cannot be read: {error}",
            where=str(path),
            fix="it is damaged or no ledger; a run begins a new one in another run.dir",
        ) from error
