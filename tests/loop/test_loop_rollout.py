"""`rollmill rollout`: answers without training."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report
from rollmill.loop.state import TRAINER_STATE
from rollmill.telemetry.samples import read_samples
from rollmill.trainer.checkpoint import CheckpointStore
from rollmill.trainer.worker import TorchTrainer
from support.tiny import CONTEXT_LENGTH
from support.tiny_run import metrics_of, rollmill, write_tiny_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(
        tmp_path_factory.mktemp("rollout"),
        run__num_steps=1,
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=2,
        rollout__filters={"dynamic": "drop.py:drop_some"},
        reward={"type": "random"},
        eval__datasets=[],
        telemetry__console=False,
    )


def save_checkpoint(folder: Path, *, step: int) -> None:
    """The checkpoint of a run, as far as engines need it."""
    trainer = TorchTrainer(
        config={"num_threads": 1, "device": "cpu"},
        model_path=str(folder / "model"),
        seed=0,
        num_total_steps=step,
        context_length=CONTEXT_LENGTH,
    )
    store = CheckpointStore(folder / "run" / "checkpoints", keep=1)
    state = store.begin(step) / TRAINER_STATE
    state.mkdir()
    trainer.save(str(state))
    store.commit(step, {"weight_version": step})


def files_of(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def test_answers_are_generated_and_judged_and_nothing_is_trained(config: Path) -> None:
    (config.parent / "drop.py").write_text(
        "def drop_some(group):\n    return group.group_index != 1, 'not this one'\n"
    )
    out = config.parent / "answers"
    done = rollmill("rollout", config, "--out", out, "--batches", "2")
    assert done.returncode == 0, done.stderr
    assert "8 groups by weights of version 0" in done.stdout
    assert "1 rejected or failed" in done.stdout
    assert not (config.parent / "run").exists()
    samples = [
        sample
        for step in (1, 2)
        for sample in read_samples(out / "samples" / f"step_{step:06d}.parquet")
    ]
    assert len(samples) == 16
    assert all(s.reward in (0.0, 1.0) and s.weight_versions.max() == 0 for s in samples)
    dropped = read_samples(out / "dropped" / "step_000001.parquet")
    assert {s.group_index for s in dropped} == {1}
    balance = read_report(out / "ledger.sqlite").balance
    assert (balance[State.READY], balance[State.REJECTED]) == (8, 1)
    assert len(metrics_of(out, "train")) == 2
    again = rollmill("rollout", config, "--out", out)
    assert again.returncode == 2
    assert "the folder to write to is not empty" in again.stderr


def test_the_newest_checkpoint_answers_and_the_run_is_left_alone(config: Path) -> None:
    save_checkpoint(config.parent, step=1)
    before = files_of(config.parent / "run")
    out = config.parent / "after"
    done = rollmill("rollout", config, "--out", out, "rollout.asynchronous=true")
    assert done.returncode == 0, done.stderr
    assert "4 groups by weights of version 1" in done.stdout
    samples = read_samples(out / "samples" / "step_000001.parquet")
    assert {int(v) for s in samples for v in s.weight_versions} == {1}
    assert files_of(config.parent / "run") == before
