"""Measuring a run: known figures are found again, and a real run is explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.config.load import load_config
from rollmill.errors import ConfigError
from rollmill.plan.assumptions import names, stated
from rollmill.plan.fit import decode_line, fit, grade_seconds, train_line, weighted_line
from rollmill.plan.setup import alternatives, contention_of, schedule_of
from rollmill.telemetry.timeline import Span
from support.tiny_run import metrics_of, rollmill, write_tiny_run

STATED = (
    "response_tokens=500",
    "tokens_per_second=2000",
    "tokens_per_second_alone=50",
    "train_tokens_per_second=4000",
    "sync_s=1",
)


def spans(count: int, start: float, seconds: float, tokens: int) -> list[Span]:
    details = {"request": "train/0/0", "tokens": tokens}
    return [
        Span("engines", "generate", start, start + seconds, dict(details)) for _ in range(count)
    ]


def test_the_line_of_an_engine_is_found_in_its_requests() -> None:
    # 0.02 + 0.001·c seconds per decoding step, at three loads one after the other.
    requests = []
    for number, count in enumerate((1, 10, 40)):
        requests += spans(count, 100.0 * number, 50 * (0.02 + 0.001 * count), 50)
    assert decode_line(requests, 64, 1) == pytest.approx((0.02, 0.001))
    # Two engines shared the requests: each decoded half of them.
    assert decode_line(requests, 64, 2) == pytest.approx((0.02, 0.002))


def test_requests_in_line_are_not_decoded() -> None:
    """Eighty requests at an engine of forty places take twice as long as forty."""
    requests = spans(20, 0.0, 50 * 0.04, 50) + spans(80, 100.0, 2 * 50 * 0.06, 50)
    assert decode_line(requests, 40, 1) == pytest.approx((0.02, 0.001))


@given(
    points=st.lists(
        st.tuples(st.floats(0.1, 100), st.floats(0.01, 100), st.floats(0.01, 10)), min_size=1
    )
)
def test_a_line_never_has_a_negative_part(points: list[tuple[float, float, float]]) -> None:
    x, y, weights = (np.array(column) for column in zip(*points, strict=True))
    fixed, slope = weighted_line(x, y, weights)
    assert fixed >= 0
    assert slope >= 0
    assert fixed + slope * x.max() > 0


def test_training_time_is_a_line_only_when_batches_differ() -> None:
    tokens = np.array([1000.0, 2000.0, 4000.0])
    assert train_line(tokens, 0.5 + tokens / 1000) == pytest.approx((0.5, 1000.0))
    alike = np.array([1000.0, 1010.0, 990.0])
    assert train_line(alike, np.array([2.0, 1.0, 3.0])) == pytest.approx((0.0, 500.0))


def test_judging_time_leaves_out_the_wait_in_line() -> None:
    apart = [Span("rewards", "judge", 10.0 * n, 10.0 * n + 0.5) for n in range(4)]
    assert grade_seconds(apart, 2) == pytest.approx(0.5)
    in_line = [Span("rewards", "judge", 0.0, 0.5 * (n + 1)) for n in range(4)]
    assert grade_seconds(in_line, 1) == pytest.approx(0.5)
    assert grade_seconds([], 1) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokens_per_secnd=1", "name=value with one of"),
        ("tokens_per_second=0", "a number from"),
        ("tokens_per_second=fast", "a number from"),
        ("tokens_per_second", "a number from"),
        ("accepted_share=1.5", "to 1"),
        ("contention=0.5", "from 1"),
        ("sync_s=nan", "a number from"),
    ],
)
def test_an_assumption_that_cannot_be_says_what_can(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stated([*STATED, text])
    assert expected in (caught.value.expected or "")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="sync_s"):
        stated(STATED[:-1])
    assert set(names()) >= {text.partition("=")[0] for text in STATED}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of the real loop."""
    folder = tmp_path_factory.mktemp("plan")
    config = write_tiny_run(
        folder,
        run__num_steps=4,
        rollout__batch_size=8,
        reward={"type": "random"},
        telemetry__console=False,
    )
    done = rollmill("train", config)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_measured_run_is_explained_by_its_own_figures(run: Path) -> None:
    config = load_config(run / "run" / "config.yaml")
    measured = fit(run / "run", schedule_of(config))
    found = metrics_of(run / "run", "train")[1:]
    assert measured.steps == (2, 3, 4)
    assert measured.step_s == pytest.approx(np.mean([r["time/step_s"] for r in found]))
    assert measured.simulated_s == pytest.approx(measured.step_s, rel=0.02)
    assert measured.assumptions.sync_s == pytest.approx(np.mean([r["time/sync_s"] for r in found]))
    written = sum(len(group) for group in measured.assumptions.lengths)
    assert written == 3 * 8 * 8, "the evaluation's answers and the first step's are left out"
    assert fit(run / "run", schedule_of(config), last_step=2).steps == (2,)
    with pytest.raises(ConfigError, match="too short"):
        fit(run / "run", schedule_of(config), last_step=1)


def test_the_command_measures_replaces_and_compares(run: Path) -> None:
    config = run / "config.yaml"
    done = rollmill(
        "plan", config, "--trace", run / "run", "--assume", "sync_s=100", "--steps", "4"
    )
    assert done.returncode == 0, done.stderr
    assert "measured in steps 2 to 4" in done.stdout
    assert "1 of them replaced" in done.stdout
    assert "sync_s 100" in done.stdout
    assert "memory on this machine" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith(("synchr", "staleness"))]
    assert [row.split("  ")[0] for row in rows][:4] == [
        "synchronous",
        "staleness 1",
        "staleness 2",
        "staleness 4",
    ]
    assert max(map(len, rows)) <= 80


def test_a_run_of_recorded_answers_has_nothing_to_plan(run: Path) -> None:
    sft = ["rollout.source=replay", "rollout.n_samples_per_prompt=1", "data.sft={}"]
    algorithm = ["trainer.algorithm.advantage=none", "trainer.algorithm.loss=sft"]
    with pytest.raises(ConfigError, match="nothing to plan"):
        schedule_of(load_config(run / "config.yaml", [*sft, *algorithm]))


def test_the_command_needs_speeds(run: Path) -> None:
    done = rollmill("plan", run / "config.yaml")
    assert done.returncode == 2
    assert "tokens_per_second_alone" in done.stderr
    missing = rollmill("plan", run / "config.yaml", "model.path=nowhere", *_options(*STATED))
    assert missing.returncode == 0, missing.stderr
    assert "memory: not estimated" in missing.stdout


def _options(*texts: str) -> list[str]:
    return [part for text in texts for part in ("--assume", text)]


def test_the_configurations_own_schedule_comes_first(run: Path) -> None:
    config = load_config(run / "config.yaml", ["engine.num_engines=2", "rollout.asynchronous=true"])
    schedule = schedule_of(config)
    assert (schedule.max_staleness, schedule.num_engines, schedule.places) == (1, 2, 256)
    found = alternatives(schedule)
    assert next(iter(found.values())) == schedule
    engines = {name: one.num_engines for name, one in found.items() if "engine" in name}
    assert sorted(engines.values()) == [1, 4, 8]
    lent = load_config(run / "config.yaml", ["engine.num_engines=3", "eval.num_engines=1"])
    assert schedule_of(lent).num_engines == 2, "one of them evaluates"
    apart = load_config(run / "config.yaml", ["engine.urls=[http://a, http://b]"])
    assert contention_of(apart) == 1
    assert schedule_of(apart).places == 128
