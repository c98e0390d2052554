"""The books of a run: where every group is, in SQLite.

Every group that was issued is in exactly one state, and each change of state is an event with a
number. The number of the last event is the ledger's *position*; a checkpoint stores it, and
`rewind` undoes all that came after it (the events stay in the file, marked as undone, so that the
history of a group tells the whole story). Consumed, rejected and failed are final: a group that
reached one of them can never be trained (again).

One process writes, in batched transactions (write-ahead log); any number may read. A thread writes,
so that nobody who records waits for the disk. What was recorded and not yet written is lost with
the process, and that is no harm: a resume goes back to a position that was written before its
checkpoint was.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from rollmill.errors import LedgerError

FLUSH_EVENTS = 512
FLUSH_SECONDS = 0.5

SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    group_index INTEGER NOT NULL,
    state TEXT NOT NULL,
    step INTEGER,
    reason TEXT,
    num_tokens INTEGER NOT NULL,
    time REAL NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS events_by_group ON events (group_index);
CREATE TABLE IF NOT EXISTS groups (
    group_index INTEGER PRIMARY KEY,
    state TEXT NOT NULL,
    step INTEGER,
    reason TEXT,
    num_tokens INTEGER NOT NULL
);
"""


class State(StrEnum):
    """Where a group is."""

    ISSUED = "issued"
    IN_FLIGHT = "in_flight"
    WAITING = "waiting"
    READY = "ready"
    CONSUMED = "consumed"
    REJECTED = "rejected"
    FAILED = "failed"


FINAL = frozenset({State.CONSUMED, State.REJECTED, State.FAILED})
NEXT: dict[State | None, frozenset[State]] = {
    None: frozenset({State.ISSUED}),
    State.ISSUED: frozenset(
        {State.IN_FLIGHT, State.READY, State.REJECTED, State.FAILED}  # the last three: replayed
    ),
    State.IN_FLIGHT: frozenset(
        {State.ISSUED, State.WAITING, State.READY, State.REJECTED, State.FAILED}
    ),
    State.WAITING: frozenset({State.IN_FLIGHT, State.ISSUED}),
    State.READY: frozenset({State.CONSUMED, State.ISSUED, State.WAITING, State.REJECTED}),
    **{state: frozenset() for state in FINAL},
}


_Event = tuple[int, str, int | None, str | None, int, float]


class Ledger:
    """The writing side; `ledger_report` is for everyone else.

    Args:
        path: the SQLite file, created when missing.

    Raises:
        LedgerError: the file is not a ledger.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise LedgerError(
                f"the ledger cannot be opened: {error}",
                where=str(path),
                fix="move the file away to start with empty books",
            ) from None
        self._buffer: list[_Event] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._handed_over: list[_Event] = []
        self._writing: Future[None] | None = None
        self._last_flush = time.monotonic()
        self._highest = -1
        self._load()

    def record(
        self,
        group_index: int,
        state: State,
        *,
        step: int | None = None,
        reason: str | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Move a group to a state.

        Raises:
            LedgerError: the group cannot go there from where it is (trained twice, for example);
                or what was recorded before cannot be written.
        """
        before = self._live.get(group_index)
        if before is None and self._was_closed(group_index):
            raise self._impossible(group_index, "a final state", state)
        if state not in NEXT[before]:
            raise self._impossible(group_index, before or "not issued", state)
        if before is not None:
            self._counts[before] -= 1
        self._counts[state] += 1
        if state in FINAL:
            del self._live[group_index]
        else:
            self._live[group_index] = state
            self._highest = max(self._highest, group_index)
        self._buffer.append((group_index, state, step, reason, num_tokens, time.time()))
        is_due = time.monotonic() - self._last_flush > FLUSH_SECONDS
        if is_due or len(self._buffer) >= FLUSH_EVENTS:
            self._hand_over()

    def flush(self) -> None:
        """Return when all that was recorded is written.

        Raises:
            LedgerError: it cannot be written; it is kept, and the next call tries again.
        """
        self._end_writing()
        self._write(self._buffer)
        self._buffer.clear()

    def _hand_over(self) -> None:
        """Have the thread write what is buffered, unless it is still at work."""
        if self._writing is not None and not self._writing.done():
            return
        self._end_writing()
        self._handed_over, self._buffer = self._buffer, []
        self._writing = self._writer.submit(self._write, self._handed_over)

    def _end_writing(self) -> None:
        """Wait for the thread; what it could not write is at the front of the buffer again."""
        self._last_flush = time.monotonic()
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except LedgerError:
            self._buffer = self._handed_over + self._buffer
            raise
        finally:
            self._handed_over = []

    def _write(self, events: list[_Event]) -> None:
        """One transaction. Only one thread at a time is here, or uses the database otherwise."""
        if not events:
            return
        newest = {row[0]: row[:5] for row in events}
        with self._transaction():
            self._db.executemany(
                "INSERT INTO events (group_index, state, step, reason, num_tokens, time) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                events,
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO groups (group_index, state, step, reason, num_tokens) "
                "VALUES (?, ?, ?, ?, ?)",
                newest.values(),
            )

    def position(self) -> int:
        """The number of the last event, everything written and safe from a loss of power.

        Raises:
            LedgerError: it cannot be written.
        """
        self.flush()
        with self._written():
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # syncs the log, then the file
        return self._last_event()

    def _last_event(self) -> int:
        (last,) = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()
        return int(last)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing.

        Raises:
            LedgerError: the file cannot be written.
        """
        with self._written():
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Raises LedgerError when the file cannot be written (a full disk, somebody's lock)."""
        try:
            yield
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise LedgerError(
                f"the ledger cannot be written: {error}",
                where=str(self._path),
                fix="make room on the disk, or end the program that locks the file",
            ) from error

    def rewind(self, position: int) -> int:
        """Undo every event after `position`; the number of events undone.

        Raises:
            LedgerError: the ledger never reached that position (it belongs to another run).
        """
        self.flush()
        if position > (last := self._last_event()):
            raise LedgerError(
                "the ledger ends before the position that the checkpoint names",
                where=str(self._path),
                expected=f"at least {position} events",
                found=f"{last}",
                fix="put the run's own ledger file back beside its checkpoints",
            )
        with self._transaction():
            touched = self._db.execute(
                "SELECT DISTINCT group_index FROM events WHERE seq > ? AND undone = 0", (position,)
            ).fetchall()
            undone = self._db.execute(
                "UPDATE events SET undone = 1 WHERE seq > ? AND undone = 0", (position,)
            ).rowcount
            self._db.executemany("DELETE FROM groups WHERE group_index = ?", touched)
            self._db.executemany(
                "INSERT INTO groups SELECT group_index, state, step, reason, num_tokens "
                "FROM events WHERE group_index = ? AND undone = 0 ORDER BY seq DESC LIMIT 1",
                touched,
            )
        self._load()
        return int(undone)

    def balance(self) -> dict[State, int]:
        """Groups by state, every state named; the values sum to the groups issued."""
        return {state: self._counts[state] for state in State}

    def state_of(self, group_index: int) -> State | None:
        """Where a group is; None when it was never issued."""
        self.flush()
        row = self._db.execute(
            "SELECT state FROM groups WHERE group_index = ?", (group_index,)
        ).fetchone()
        return None if row is None else State(row[0])

    def state_of_live(self, group_index: int) -> State | None:
        """Where a group is, without a look at the file; None when it is final or unknown."""
        return self._live.get(group_index)

    def live(self) -> dict[int, State]:
        """The groups that are in no final state."""
        return dict(self._live)

    def close(self) -> None:
        """Write what is buffered and let go of the file."""
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            self._db.close()

    def _load(self) -> None:
        rows = self._db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall()
        self._counts = Counter({State(state): count for state, count in rows})
        marks = ",".join("?" for _ in FINAL)
        live = self._db.execute(
            f"SELECT group_index, state FROM groups WHERE state NOT IN ({marks})", sorted(FINAL)
        ).fetchall()
        self._live = {index: State(state) for index, state in live}
        (highest,) = self._db.execute(
            "SELECT COALESCE(MAX(group_index), -1) FROM groups"
        ).fetchone()
        self._highest = int(highest)

    def _was_closed(self, group_index: int) -> bool:
        """Whether a group that is not live was issued before (cheap for ascending indices)."""
        return group_index <= self._highest and self.state_of(group_index) is not None

    def _impossible(self, group_index: int, before: str, after: State) -> LedgerError:
        return LedgerError(
            f"group {group_index} cannot become {after.value}",
            where=str(self._path),
            expected="a state that follows the one it is in",
            found=str(before),
            fix="this is a fault in rollmill or in a custom data source: please report it",
        )
