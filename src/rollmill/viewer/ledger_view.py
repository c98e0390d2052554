"""What the page shows of a run's ledger: where every prompt is, and what was wasted.

The file is opened for reading, for one short query at a time, so the run's own transactions never
wait. Column names are those of the ledger's schema (`rollmill.data.ledger`), which this room does
not import: it reads files only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.viewer.errors import NotInRun

STATES = ("issued", "in_flight", "waiting", "ready", "consumed", "rejected", "failed")
NUM_BINS = 24
PAGE_SIZE = 200
BUSY_SECONDS = 2.0
LOOK_BACK = 8192


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """One group on its way through the engines.

    Attributes:
        group: which prompt.
        start: when it was taken up, seconds since the epoch.
        end: when it left; None while it is in flight.
        state: what it became.
        num_tokens: response tokens it had then.
    """

    group: int
    start: float
    end: float | None
    state: str
    num_tokens: int


class LedgerView:
    """The ledger of one run.

    Args:
        path: the SQLite file; it may be missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def summary(self) -> dict[str, Any]:
        """Groups and tokens by state, reasons, lengths of what was kept and dropped.

        Raises:
            NotInRun: there is no ledger.
            sqlite3.Error: the file is no ledger.
        """
        with self._reading() as db:
            states = db.execute(
                "SELECT state, COUNT(*), SUM(num_tokens) FROM groups GROUP BY state"
            ).fetchall()
            reasons = db.execute(
                "SELECT state, COALESCE(reason, ''), COUNT(*), SUM(num_tokens) FROM groups "
                "WHERE state IN ('rejected', 'failed') GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 200"
            ).fetchall()
            undone = db.execute("SELECT COUNT(*) FROM events WHERE undone = 1").fetchone()
            lengths = _lengths(db)
        counts = {state: (count, tokens or 0) for state, count, tokens in states}
        return {
            "states": [
                {"state": s, "groups": counts.get(s, (0, 0))[0], "tokens": counts.get(s, (0, 0))[1]}
                for s in STATES
            ],
            "issued": sum(count for count, _ in counts.values()),
            "reasons": [
                {"state": s, "reason": r, "groups": n, "tokens": t or 0} for s, r, n, t in reasons
            ],
            "undone_events": undone[0],
            "lengths": lengths,
        }

    def groups(self, state: str | None, before: int | None) -> list[dict[str, Any]]:
        """Some groups, newest first: those below index `before`, of one state or of all."""
        where, values = ["1"], list[Any]()
        if state is not None:
            where.append("state = ?")
            values.append(state)
        if before is not None:
            where.append("group_index < ?")
            values.append(before)
        with self._reading() as db:
            rows = db.execute(
                "SELECT group_index, state, step, reason, num_tokens FROM groups "
                f"WHERE {' AND '.join(where)} ORDER BY group_index DESC LIMIT {PAGE_SIZE}",
                values,
            ).fetchall()
        names = ("group", "state", "step", "reason", "tokens")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def history(self, group: int) -> list[dict[str, Any]]:
        """Everything that happened to one group, undone events included."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT seq, state, step, reason, num_tokens, time, undone FROM events "
                "WHERE group_index = ? ORDER BY seq",
                (group,),
            ).fetchall()
        names = ("seq", "state", "step", "reason", "tokens", "time", "undone")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def spans(self, start: float, end: float) -> list[GroupSpan]:
        """The groups that were in flight between `start` and `end`.

        Those taken up more than `LOOK_BACK` events before `start` are not found.
        """
        with self._reading() as db:
            first, stop = _seq_at(db, start) - LOOK_BACK, _seq_at(db, end)
            rows = db.execute(
                "SELECT group_index, state, num_tokens, time FROM events "
                "WHERE seq >= ? AND seq < ? ORDER BY seq",
                (first, stop),
            ).fetchall()
        return [span for span in _pair(rows) if span.end is None or span.end >= start]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if not self._path.is_file():
            raise NotInRun("the run has no ledger (yet)")
        # A finished run on a read-only disk has no write-ahead log, and SQLite cannot make one.
        is_at_rest = not self._path.with_name(f"{self._path.name}-wal").exists()
        address = f"{self._path.resolve().as_uri()}?mode=ro{'&immutable=1' if is_at_rest else ''}"
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS)) as db:
            yield db


def _seq_at(db: sqlite3.Connection, when: float) -> int:
    """The number of the first event at or after a time (events are in order of time)."""
    low, high = db.execute(
        "SELECT COALESCE(MIN(seq), 1), COALESCE(MAX(seq), 0) + 1 FROM events"
    ).fetchone()
    while low < high:
        middle = (low + high) // 2
        row = db.execute(
            "SELECT time FROM events WHERE seq >= ? ORDER BY seq LIMIT 1", (middle,)
        ).fetchone()
        if row is not None and row[0] < when:
            low = middle + 1
        else:
            high = middle
    return int(low)


def _pair(rows: Sequence[tuple[int, str, int, float]]) -> list[GroupSpan]:
    """Match each departure with its arrival."""
    started: dict[int, float] = {}
    spans = []
    for group, state, num_tokens, time in rows:
        if state == "in_flight":
            started[group] = time
        elif group in started:
            spans.append(GroupSpan(group, started.pop(group), time, state, num_tokens))
    running = [GroupSpan(group, time, None, "in_flight", 0) for group, time in started.items()]
    return spans + running


def _lengths(db: sqlite3.Connection) -> dict[str, Any]:
    """Histograms of tokens per group of what was trained on and what was dropped.

    Groups that wrote nothing are left out: they say nothing about the lengths that are dropped.
    """
    (longest,) = db.execute("SELECT COALESCE(MAX(num_tokens), 0) FROM groups").fetchone()
    width = max(1, -(-(longest + 1) // NUM_BINS))
    means = db.execute(
        "SELECT state, AVG(num_tokens), COUNT(*) FROM groups "
        "WHERE state IN ('consumed', 'rejected', 'failed') AND num_tokens > 0 GROUP BY state"
    ).fetchall()
    bins: dict[str, list[int]] = {state: [0] * NUM_BINS for state, _, _ in means}
    for state, number, count in db.execute(
        f"SELECT state, num_tokens / {width}, COUNT(*) FROM groups "
        "WHERE state IN ('consumed', 'rejected', 'failed') AND num_tokens > 0 GROUP BY 1, 2"
    ):
        bins[state][number] = count
    return {
        "bin_width": width,
        "bins": bins,
        "mean": {state: mean for state, mean, _ in means},
        "count": {state: count for state, _, count in means},
    }
