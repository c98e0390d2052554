"""The whole system on a model of 1.06 million parameters that learns in seconds."""

from pathlib import Path

from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report
from rollmill.telemetry.samples import read_samples
from support.tiny import exact_match, warm_start
from support.tiny_run import metrics_of, rollmill, write_tiny_run

STEPS = 60
GROUPS = 32


def test_grpo_takes_a_warm_started_model_from_guessing_to_right(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, model_size=(128, 4), run__num_steps=STEPS)
    warm_start(tmp_path / "model")
    run = tmp_path / "run"

    finished = rollmill("train", config)

    assert finished.returncode == 0, finished.stderr
    before, after = metrics_of(run, "eval")
    assert (before["step"], after["step"]) == (0, STEPS)
    assert before["eval/sorted/pass@1"] < 0.75
    assert after["eval/sorted/pass@1"] >= 0.9
    trained = metrics_of(run, "train")
    assert [record["step"] for record in trained] == list(range(1, STEPS + 1))
    assert max(record["train/mismatch/log_prob_diff_max"] for record in trained) < 1e-4
    assert all(record["rollout/staleness_max"] == 0 for record in trained)

    report = read_report(run / "ledger.sqlite")
    assert report.balance[State.CONSUMED] == report.num_issued == STEPS * GROUPS

    exported = rollmill("export", run, tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr
    outside = exact_match(tmp_path / "exported", tmp_path / "task" / "eval.jsonl")
    assert abs(outside - after["eval/sorted/pass@1"]) < 0.01, "the engine and transformers disagree"

    samples = read_samples(run / "samples" / f"step_{STEPS:06d}.parquet")
    assert len(samples) == GROUPS * 8
    assert {version for s in samples for version in s.weight_versions} == {STEPS - 1}
