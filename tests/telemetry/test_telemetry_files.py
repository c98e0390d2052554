import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rollmill.sample import Sample, Segment, Status
from rollmill.telemetry.console import RunView, sparkline
from rollmill.telemetry.metrics_log import MetricsLog, read_metrics
from rollmill.telemetry.progress import Progress
from rollmill.telemetry.samples import SampleDump, read_samples


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
