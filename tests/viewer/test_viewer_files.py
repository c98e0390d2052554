"""Samples, ledger and timeline as the viewer reads them."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.data.ledger import Ledger, State
from rollmill.data.ledger_report import read_report
from rollmill.telemetry.timeline import Span
from rollmill.viewer.cache import SizedCache
from rollmill.viewer.errors import NotInRun, ViewerError
from rollmill.viewer.ledger_view import STATES, LedgerView
from rollmill.viewer.metrics_index import MetricsIndex, StepRecord
from rollmill.viewer.runs import open_runs
from rollmill.viewer.sample_files import SampleFiles, scalar_reward
from rollmill.viewer.search import Query, search
from rollmill.viewer.texts import clean, messages, pretty
from rollmill.viewer.timeline_view import TimelineView, busy_seconds, phase_spans, tail
from support.made_run import Shape, make_run


def span(start: float, end: float) -> Span:
    return Span("x", "x", start, end)


def test_a_step_lists_what_its_file_holds(made_run: Path) -> None:
    files = SampleFiles(made_run)
    assert files.kinds() == ["train", "dropped", "held_out"]
    assert files.steps("train") == list(range(1, 13))
    assert files.steps("held_out") == [0, 5, 10, 12]
    table = pq.read_table(made_run / "samples" / "step_000003.parquet").to_pylist()
    rows = files.rows("train", 3)
    assert [(r.index, r.group, r.attempt, r.status, r.reward, r.length) for r in rows] == [
        (
            t["index"],
            t["group_index"],
            t["attempt"],
            t["status"],
            t["score"],
            len(t["response_tokens"]),
        )
        for t in table
    ]


def test_dropped_samples_are_listed_with_the_reason(made_run: Path, tmp_path: Path) -> None:
    rows = SampleFiles(made_run).rows("dropped", 3)
    assert [(row.group, row.attempt) for row in rows] == [(26, k) for k in range(4)]
    assert {(row.decision, row.reason) for row in rows} == {("rejected", "no spread")}
    assert {row.decision for row in SampleFiles(made_run).rows("train", 3)} == {""}
    (tmp_path / "samples").mkdir()
    assert SampleFiles(tmp_path).kinds() == ["train"], "a run that dropped nothing has no such kind"


def test_an_evaluation_set_may_have_the_name_of_another_kind(tmp_path: Path) -> None:
    for name in ("train", "dropped"):
        (tmp_path / "eval" / name).mkdir(parents=True)
        (tmp_path / "eval" / name / "step_000004.parquet").touch()
    files = SampleFiles(tmp_path)
    assert files.kinds() == ["train", "eval/dropped", "eval/train"]
    assert files.steps("train") == []
    assert files.steps("eval/train") == files.steps("eval/dropped") == [4]


def test_a_row_is_read_from_its_own_row_group(made_run: Path, tmp_path: Path) -> None:
    source = pq.read_table(made_run / "samples" / "step_000003.parquet")
    (tmp_path / "samples").mkdir()
    path = tmp_path / "samples" / "step_000003.parquet"
    pq.write_table(source, path, row_group_size=5)
    files = SampleFiles(tmp_path)
    for row in (0, 4, 5, 31):
        (entry,) = files.read("train", 3, [row])
        assert entry["response_tokens"] == source["response_tokens"][row].as_py()
    with pytest.raises(NotInRun):
        files.read("train", 3, [source.num_rows])


def test_a_file_written_again_is_read_again(made_run: Path, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    path = tmp_path / "samples" / "step_000001.parquet"
    source = pq.read_table(made_run / "samples" / "step_000001.parquet")
    pq.write_table(source.slice(0, 4), path)
    files = SampleFiles(tmp_path)
    assert len(files.rows("train", 1)) == 4
    pq.write_table(source.slice(0, 9), tmp_path / "aside")
    os.replace(tmp_path / "aside", path)
    assert len(files.rows("train", 1)) == 9


@pytest.mark.parametrize("kind", ["../samples", "nothing", "held_out/..", ""])
def test_only_the_runs_own_sets_can_be_named(made_run: Path, kind: str) -> None:
    with pytest.raises(NotInRun):
        SampleFiles(made_run).rows(kind, 1)


@pytest.mark.parametrize(
    ("entry", "key", "expected"),
    [
        ({"score": 0.5}, None, 0.5),
        ({"score": float("nan")}, None, None),
        ({"score": None, "reward_json": '{"a": 1, "b": 2}'}, "b", 2.0),
        ({"score": None, "reward_json": '{"a": 1}'}, None, None),
        ({"score": None, "reward_json": "null"}, "a", None),
    ],
)
def test_the_reward_is_one_finite_number_or_none(
    entry: dict[str, object], key: str | None, expected: float | None
) -> None:
    assert scalar_reward(entry, key) == expected


def test_a_search_stops_in_time_and_goes_on_where_it_stopped(made_run: Path) -> None:
    files = SampleFiles(made_run)
    ticks = iter(range(1000))
    query = Query(status="completed")
    found, before, rounds = [], None, 0
    while True:
        part = search(files, "train", query, before=before, seconds=2, clock=lambda: next(ticks))
        found += part["hits"]
        rounds += 1
        before = part["next"]
        if before is None:
            break
    assert rounds == 4  # three steps in two ticks
    expected = [
        (step, row.row)
        for step in range(12, 0, -1)
        for row in files.rows("train", step)
        if row.status == "completed"
    ]
    assert [(hit["step"], hit["row"]) for hit in found] == expected


def test_the_ledger_view_agrees_with_the_ledgers_own_report(made_run: Path) -> None:
    summary = LedgerView(made_run / "ledger.sqlite").summary()
    report = read_report(made_run / "ledger.sqlite")
    assert {s["state"]: s["groups"] for s in summary["states"]} == report.balance
    assert summary["issued"] == report.num_issued
    assert [(r["state"], r["reason"], r["groups"]) for r in summary["reasons"]] == report.reasons
    assert [state.value for state in State] == list(STATES)
    for state, bins in summary["lengths"]["bins"].items():
        assert sum(bins) == summary["lengths"]["count"][state] == report.balance[State(state)]


def test_the_ledger_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    view = LedgerView(tmp_path / "ledger.sqlite")
    for group in range(3):
        ledger.record(group, State.ISSUED, step=1)
        ledger.flush()
        assert view.summary()["issued"] == group + 1
    ledger.record(0, State.IN_FLIGHT, step=1)
    ledger.flush()
    (running,) = view.spans(0.0, 1e12)
    assert (running.group, running.end) == (0, None)
    ledger.close()


def test_a_missing_or_broken_ledger_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NotInRun):
        LedgerView(tmp_path / "ledger.sqlite").summary()
    (tmp_path / "ledger.sqlite").write_text("no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        LedgerView(tmp_path / "ledger.sqlite").summary()


def test_groups_of_a_step_are_found_by_time(made_run: Path) -> None:
    metrics = MetricsIndex(made_run / "metrics.jsonl")
    view = TimelineView(made_run, metrics, LedgerView(made_run / "ledger.sqlite"))
    for step in (1, 6, 12):
        (lane,) = [lane for lane in view.step(step)["lanes"] if lane["name"] == "groups"]
        groups = sorted(s["details"]["group"] for s in lane["spans"])
        assert groups == list(range((step - 1) * 9, step * 9))


def test_without_a_trace_the_clocks_tell_the_phases(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(num_steps=2, num_groups=2, is_traced=False))
    metrics = MetricsIndex(run / "metrics.jsonl")
    shown = TimelineView(run, metrics, LedgerView(run / "ledger.sqlite")).step(2)
    assert not shown["is_traced"]
    (loop,) = [lane for lane in shown["lanes"] if lane["name"] == "loop"]
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[2])
    assert [s["name"] for s in loop["spans"]] == ["rollout", "train", "sync"]
    lengths = [s["end"] - s["start"] for s in loop["spans"]]
    expected = [record[f"time/{name}_s"] for name in ("rollout", "train", "sync")]
    assert lengths == pytest.approx(expected, abs=1e-5)
    with pytest.raises(NotInRun):
        TimelineView(run, metrics, LedgerView(run / "ledger.sqlite")).step(3)


def test_phases_end_when_the_record_was_written() -> None:
    seconds = {"rollout": 3.0, "train": 2.0, "sync": 1.0, "step": 6.0}
    spans = phase_spans(StepRecord(1, 100.0, seconds))
    assert [(s.name, s.start, s.end) for s in spans] == [
        ("rollout", 94.0, 97.0),
        ("train", 97.0, 99.0),
        ("sync", 99.0, 100.0),
    ]


def test_busy_time_counts_overlaps_once() -> None:
    assert busy_seconds([span(0, 2), span(1, 3), span(5, 6)]) == 4.0
    assert busy_seconds([]) == 0.0


@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12),
)
def test_busy_time_is_that_of_the_union(spans: list[tuple[int, int]]) -> None:
    union = {t for start, length in spans for t in range(start, start + length)}
    assert busy_seconds([span(s, s + n) for s, n in spans]) == len(union)


def test_the_tail_is_the_wait_for_the_last_tenth() -> None:
    spans = [span(0, end) for end in (1, 2, 3, 4, 5, 6, 7, 8, 9, 20)]
    assert tail(spans) == {"seconds": 11, "share": 11 / 20}
    assert tail([]) is None


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    assert [run.name for run in open_runs([tmp_path / "a/run", tmp_path / "b/run"])] == [
        "a/run",
        "b/run",
    ]
    assert [run.name for run in open_runs([tmp_path / "a/run"])] == ["run"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ViewerError, match="not a run folder"):
        open_runs([tmp_path])
    with pytest.raises(ViewerError, match="no run to show"):
        open_runs([])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ViewerError, match="twice"):
        open_runs([tmp_path, tmp_path / "."])


def test_texts_are_valid_and_bearable() -> None:
    assert clean("a\ud800b") == "a?b"
    assert clean("x" * 12, 10) == "xxxxxxxxxx… (2 more characters)"
    assert pretty('"7"') == "7"
    assert pretty('{"a": 1}') == '{\n  "a": 1\n}'
    assert messages('"hello"') == [{"role": "", "text": "hello"}]
    assert messages('[{"role": "user", "content": "x", "name": "n"}]') == [
        {"role": "user", "text": 'x\n{\n  "name": "n"\n}'}
    ]


@given(sizes=st.lists(st.integers(1, 8), max_size=30))
def test_the_cache_stays_within_its_size(sizes: list[int]) -> None:
    cache: SizedCache[int] = SizedCache(10)
    for key, size in enumerate(sizes):
        assert cache.get(key, lambda size=size: (size, size)) == size
        assert sum(size for _, size in cache._entries.values()) <= 10


def test_the_cache_forgets_what_was_used_least_recently() -> None:
    cache: SizedCache[str] = SizedCache(2)
    made: list[str] = []

    def ask(name: str) -> str:
        return cache.get(name, lambda: (made.append(name) or name, 1))

    for name in ("a", "b", "a", "c", "a", "b"):
        assert ask(name) == name
    assert made == ["a", "b", "c", "b"]
