"""The timeline: spans in, a trace file out that Perfetto and the viewer read."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.telemetry.timeline import Span, Timeline, encode_trace, read_trace

SPANS = st.builds(
    Span,
    lane=st.sampled_from(["loop", "engine 0", "engine 1", "rewards"]),
    name=st.text(max_size=10),
    start=st.integers(1_700_000_000, 1_800_000_000).map(float),
    end=st.integers(1_800_000_000, 1_900_000_000).map(float),
    details=st.dictionaries(st.text(max_size=5), st.integers(0, 10**9), max_size=3),
)


def test_a_step_becomes_a_trace_event_file(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.add("engine 0", "go", 100.0, 100.5, group=7)
    timeline.add("trainer", "train", 101.0, 103.0)
    timeline.step_done(4)
    assert json.loads((tmp_path / "step_000004.json").read_bytes()) == [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "engine 0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "trainer"}},
        {"ph": "X", "name": "go", "pid": 1, "tid": 0, "ts": 1e8, "dur": 5e5, "args": {"group": 7}},
        {"ph": "X", "name": "train", "pid": 1, "tid": 1, "ts": 1.01e8, "dur": 2e6, "args": {}},
    ]  # fmt: skip


@given(spans=st.lists(SPANS, max_size=20))
def test_what_is_written_is_read_back(
    spans: list[Span], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "step.json"
    path.write_bytes(encode_trace(spans))
    read = read_trace(path)
    assert [(s.lane, s.name, s.details) for s in read] == [
        (s.lane, s.name, s.details) for s in spans
    ]
    assert [s.end for s in read] == pytest.approx([s.end for s in spans], abs=1e-5)


def test_a_span_is_booked_also_when_its_block_raises(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    with pytest.raises(RuntimeError), timeline.span("loop", "train"):
        raise RuntimeError
    timeline.step_done(1)
    (span,) = read_trace(tmp_path / "step_000001.json")
    assert (span.lane, span.name) == ("loop", "train")
    assert span.end >= span.start


def test_spans_of_a_step_are_written_once(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.add("loop", "a", 1.0, 2.0)
    timeline.step_done(1)
    timeline.step_done(2)
    assert [len(read_trace(tmp_path / f"step_00000{n}.json")) for n in (1, 2)] == [1, 0]


def test_threads_may_add_at_once(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)

    def work() -> None:
        for number in range(500):
            timeline.add("loop", "x", number, number + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.step_done(1)
    assert len(read_trace(tmp_path / "step_000001.json")) == 2000


def test_a_resume_forgets_the_steps_it_does_again(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    for step in (1, 2, 3):
        timeline.step_done(step)
    (tmp_path / "notes.txt").write_text("mine")
    timeline.forget_after(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step_000001.json"]


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    timeline = Timeline(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            timeline.add("loop", "x", 1.0, 2.0)
            timeline.step_done(step)
    assert len(caplog.records) == 1


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    timeline = Timeline(None)
    with timeline.span("loop", "x"):
        pass
    timeline.step_done(1)
    timeline.forget_after(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"ph": "X"}]', "not json", '[{"ph":"X","tid":9}]'])
def test_a_file_that_is_no_trace_is_a_value_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    if text == "{}":
        assert read_trace(path) == []
    else:
        with pytest.raises(ValueError):
            read_trace(path)
