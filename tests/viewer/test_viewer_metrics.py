"""Reading metrics: only what is new, whole lines, at most so many points."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.viewer.downsample import downsample, in_order
from rollmill.viewer.metrics_index import MetricsIndex
from rollmill.viewer.waste import token_report

STEPS = st.lists(st.integers(0, 50), max_size=60)


def line(step: int, kind: str = "train", **figures: float | None) -> str:
    named = {name.replace("__", "/"): value for name, value in figures.items()}
    return json.dumps({"step": step, "kind": kind, "time": 100.0 + step, **named}) + "\n"


def values(index: MetricsIndex, name: str) -> dict[float, float]:
    curve = index.curves([name], 1000).get(name)
    return {} if curve is None else dict(zip(curve.x.tolist(), curve.y.tolist(), strict=True))


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, reward__mean=0.1) + line(2, reward__mean=0.2))
    index = MetricsIndex(path)
    assert values(index, "reward/mean") == {1: 0.1, 2: 0.2}
    taken: list[bytes] = []
    take = index._take
    monkeypatch.setattr(index, "_take", lambda block: (taken.append(block), take(block)))
    new = line(3, reward__mean=0.3)
    with path.open("a") as file:
        file.write(new)
    assert values(index, "reward/mean") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert b"".join(taken) == new.encode()


def test_a_line_that_is_not_finished_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = line(1, reward__mean=0.1)
    path.write_text(whole[:20])
    index = MetricsIndex(path)
    assert index.headline().num_records == 0
    with path.open("a") as file:
        file.write(whole[20:])
    assert values(index, "reward/mean") == {1: 0.1}
    assert index.headline().num_bad_lines == 0


def test_a_file_that_a_resume_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, reward__mean=0.1) + line(2, reward__mean=0.2))
    index = MetricsIndex(path)
    before = index.headline()
    aside = tmp_path / "aside"
    aside.write_text(
        line(1, reward__mean=0.1) + line(2, reward__mean=0.9) + line(3, reward__mean=1)
    )
    aside.replace(path)
    after = index.headline()
    assert after.generation != before.generation
    assert values(index, "reward/mean") == {1: 0.1, 2: 0.9, 3: 1.0}


def test_a_missing_file_is_an_empty_run_until_it_comes(tmp_path: Path) -> None:
    index = MetricsIndex(tmp_path / "metrics.jsonl")
    assert index.headline().last_step is None
    assert index.names() == []
    (tmp_path / "metrics.jsonl").write_text(line(5, reward__mean=0.5))
    assert index.headline().last_step == 5


def test_bad_lines_and_gaps_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "not json\n[1]\n{}\n" + line(1, reward__mean=None, a=True) + line(2, reward__mean=0.2)
    )
    index = MetricsIndex(path)
    assert index.headline().num_bad_lines == 3
    assert values(index, "reward/mean") == {2: 0.2}


def test_an_evaluation_does_not_repeat_the_clocks_of_the_step_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(1, time__train_s=3.0)
        + line(1, "eval", time__train_s=3.0, time__eval_s=9.0, eval__a__reward=1.0)
    )
    index = MetricsIndex(path)
    assert index.names() == ["eval/a/reward", "time/eval_s", "time/train_s"]
    assert len(index.curves(["time/train_s"], 10)["time/train_s"].x) == 1
    record = index.step_record(1)
    assert record is not None
    assert (record.time, dict(record.seconds)) == (101.0, {"train": 3.0})


def test_long_series_are_shortened_without_hiding_a_spike() -> None:
    steps = np.arange(1, 1001.0)
    series = np.zeros(1000)
    series[500] = 77.0
    curve = downsample(steps, series, 100)
    assert len(curve.x) == 100
    assert curve.high is not None
    assert curve.high.max() == 77.0
    assert curve.y.max() == pytest.approx(7.7)
    assert curve.x[-1] == 1000


@given(
    series=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    points=st.integers(1, 50),
)
def test_buckets_keep_the_mean_the_extremes_and_the_order(series: list[float], points: int) -> None:
    steps = np.arange(len(series), dtype=float)
    array = np.array(series)
    curve = downsample(steps, array, points)
    assert len(curve.x) == min(points, len(series))
    assert np.all(np.diff(curve.x) > 0)
    assert curve.x[-1] == len(series) - 1
    if curve.low is not None and curve.high is not None:
        assert curve.low.min() == array.min()
        assert curve.high.max() == array.max()
        assert np.all(curve.low <= curve.y + 1e-6)
        assert np.all(curve.y <= curve.high + 1e-6)


@given(steps=STEPS)
def test_of_several_values_for_a_step_the_last_counts(steps: list[int]) -> None:
    found = in_order(np.array(steps, float), np.arange(len(steps), dtype=float))
    expected = {step: float(at) for at, step in enumerate(steps)}
    assert dict(zip(*(a.tolist() for a in found), strict=True)) == expected
    assert found[0].tolist() == sorted(set(steps))


def test_tokens_are_summed_over_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {
            "rollout__generated_tokens": 100,
            "rollout__wasted_tokens": 20,
            "rollout__wasted_tokens__stale": 5,
            "rollout__wasted_tokens__aborted": 0,
            "train__tokens__trained": 70,
            "train__tokens__skipped": 10,
            "train__tokens__positions": 200,
            "train__tokens__padding_share": share,
        }
        for share in (0.1, 0.2)
    ]
    path.write_text("".join(line(step, **row) for step, row in enumerate(rows, start=1)))
    report = token_report(MetricsIndex(path))
    assert report == {
        "generated": 200,
        "kept": 0,
        "trained": 140,
        "skipped": 20,
        "wasted": 40,
        "wasted_by_reason": {"stale": 10},
        "padding": pytest.approx(60),
        "positions": 400,
    }
