import io
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollmill.config.run import TelemetryConfig
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.telemetry.console import RunView, sparkline
from rollmill.telemetry.dropped import Dropped, DroppedDump, fair_choice
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog, read_metrics
from rollmill.telemetry.progress import Progress
from rollmill.telemetry.samples import SampleDump, read_samples
from rollmill.telemetry.step_files import StepFiles


def test_records_come_back_in_order_with_numbers_that_json_can_hold(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("train", 1, {"b": 2.5, "a": math.nan})
    log.write("eval", 1, {"c": math.inf})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["kind"], first["a"], first["b"]) == (1, "train", None, 2.5)
    assert (second["kind"], second["c"]) == ("eval", None)


def test_a_resume_drops_the_records_of_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write("train", step, {"x": step})
    path.write_bytes(path.read_bytes() + b'{"step": 4, "ki')
    log.forget_after(2)
    log.write("train", 3, {"x": 30.0})
    assert [(r["step"], r["x"]) for r in read_metrics(path)] == [(1, 1), (2, 2), (3, 30.0)]


def test_metrics_that_cannot_be_written_cost_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").mkdir()
    log.write("train", 1, {"x": 1.0})
    log.write("train", 2, {"x": 1.0})
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_a_step_file_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = StepFiles(tmp_path, "numbers")
    for step in (1, 2):
        (tmp_path / f"step_{step:06d}.parquet").mkdir()  # in the way of the finished file
        files.write(step, pa.table({"number": [step]}))
    assert len([r for r in caplog.records if "numbers cannot be written" in r.message]) == 1
    assert list(tmp_path.glob("*.tmp")) == []
    files.write(3, pa.table({"number": [3]}))
    assert pq.read_table(tmp_path / "step_000003.parquet")["number"].to_pylist() == [3]


def sample(index: int, response: str = "ok") -> Sample:
    return Sample(
        prompt_tokens=np.array([1, 2], np.int32),
        index=index,
        prompt="question",
        segments=[Segment.from_engine([3, 4], [-0.5, -0.25], 7)],
        response=response,
        status=Status.COMPLETED,
        reward=1.0,
    )


def test_dumped_samples_come_back_exactly(tmp_path: Path) -> None:
    samples = [sample(0), sample(1, "ünï\x00code")]
    path = SampleDump(tmp_path / "samples").write(3, samples)
    assert path.name == "step_000003.parquet"
    assert list(read_samples(path)) == samples
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing half-written is left"


def test_samples_that_cannot_be_written_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    SampleDump(tmp_path / "samples").write(1, [sample(0)])
    assert "cannot be written" in caplog.text


def view_of(num_steps: int = 5) -> tuple[RunView, io.StringIO]:
    out = io.StringIO()
    return RunView(is_on=True, num_steps=num_steps, console=Console(file=out, width=160)), out


def group(index: int, size: int = 2) -> Group:
    return Group(index, [sample(index * 10 + k) for k in range(size)])


def test_dropped_groups_are_kept_with_the_reason(tmp_path: Path) -> None:
    dropped = [
        Dropped(group(0), "rejected", "no spread"),
        Dropped(group(1), "failed", "boom\ud800"),
    ]
    path = DroppedDump(tmp_path, 100).write(4, dropped)
    assert path == tmp_path / "step_000004.parquet"
    rows = pq.read_table(path).to_pylist()
    assert [(r["index"], r["decision"], r["reason"]) for r in rows] == [
        (0, "rejected", "no spread"),
        (1, "rejected", "no spread"),
        (10, "failed", "boom?"),
        (11, "failed", "boom?"),
    ]
    assert [s.index for s in read_samples(path)] == [0, 1, 10, 11], "they are samples too"
    assert DroppedDump(tmp_path, 100).write(5, []) is None


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.sampled_from("abc")), max_size=30),
    limit=st.integers(0, 40),
)
def test_dropped_groups_stay_within_the_bound_and_every_reason_has_its_share(
    sizes: list[tuple[int, str]], limit: int
) -> None:
    dropped = [Dropped(group(n, size), "rejected", why) for n, (size, why) in enumerate(sizes)]
    chosen = fair_choice(dropped, limit)
    assert sum(len(one.group.samples) for one in chosen) <= limit
    places = [dropped.index(one) for one in chosen]
    assert places == sorted(places)
    if limit >= 15:  # room for the first of each of three reasons, 5 samples at most
        assert {one.reason for one in chosen} == {why for _, why in sizes}


def test_a_run_keeps_what_was_trained_on_dropped_and_evaluated(tmp_path: Path) -> None:
    dumps = Dumps(TelemetryConfig(max_dropped_samples=2), tmp_path)
    for step in (1, 2, 3):
        dumps.rollouts(
            step,
            [group(0)],
            rejected=[(group(1), "no spread")],
            failed=[(group(2), "boom"), (group(3), "boom")],
        )
        log_probs = np.array([-0.5, np.nan], np.float32)
        report = {"index": 0, "advantage": 0.5, "trainer_log_probs": log_probs.tobytes()}
        dumps.trained(step, [report])
        dumps.evaluation("held out", step, [sample(7)])
    assert len(read_samples(tmp_path / "dropped" / "step_000001.parquet")) == 2
    (row,) = pq.read_table(tmp_path / "trained" / "step_000003.parquet").to_pylist()
    assert row["trainer_log_probs"][0] == -0.5
    assert math.isnan(row["trainer_log_probs"][1])
    dumps.forget_after(1)
    folders = ("samples", "dropped", "trained", "eval/held out")
    names = {folder: [f.name for f in (tmp_path / folder).iterdir()] for folder in folders}
    assert names == {folder: ["step_000001.parquet"] for folder in folders}


def test_without_dump_samples_nothing_is_written(tmp_path: Path) -> None:
    dumps = Dumps(TelemetryConfig(dump_samples=False), tmp_path)
    dumps.rollouts(1, [group(0)], rejected=[(group(1), "no spread")])
    dumps.trained(1, [])
    dumps.evaluation("held out", 1, [sample(7)])
    assert not list(tmp_path.iterdir())


def test_a_step_is_one_plain_line_when_the_output_is_no_terminal() -> None:
    view, out = view_of()
    with view:
        view.phase("step 1: rollout")
        view.progress(Progress(target=8, accepted=3, rejected=1, reasons={"zero_std_0": 1}))
        view.step_done(1, {"reward/mean": 0.25, "time/rollout_s": 2.0})
        view.step_done(2, {"reward/mean": 0.5, "time/rollout_s": 2.0})
    header, first, second = out.getvalue().splitlines()
    assert header.split()[:2] == ["step", "reward"]
    assert first.split()[:2] == ["1/5", "0.250"]
    assert second.split()[:2] == ["2/5", "0.500"]
    assert "\x1b" not in out.getvalue()


def test_a_step_that_imitates_answers_shows_its_loss_instead_of_a_reward() -> None:
    view, out = view_of()
    with view:
        view.step_done(1, {"train/sft/nll": 1.5, "train/sft/perplexity": 4.4817})
    header, row = out.getvalue().splitlines()
    assert header.split()[:3] == ["step", "nll", "ppl"]
    assert row.split()[:3] == ["1/5", "1.5000", "4.482"]


def test_model_output_is_shown_as_data_never_as_markup_or_control_codes() -> None:
    view, out = view_of()
    hostile = sample(0, "[bold red]x[/] \x1b[2J\x07 " + "y" * 5000)
    view.eval_done(3, {"eval/a/reward": 0.5, "eval/a/pass@1": 0.25}, [hostile])
    text = out.getvalue()
    assert "eval after step 3  a: reward 0.500  pass@1 0.250" in text
    assert "[bold red]x[/] \\x1b[2J\\x07" in text
    assert "\x1b" not in text
    assert len(text) < 1000


def test_a_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
