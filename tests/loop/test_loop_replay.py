"""`rollmill replay` on a finished run: as it was, and with other settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.tiny_run import metrics_of, rollmill, write_tiny_run

NUM_STEPS = 3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint after each; replays only read it."""
    folder = tmp_path_factory.mktemp("replay")
    config = write_tiny_run(
        folder,
        model_size=(32, 2),
        run__num_steps=NUM_STEPS,
        run__save_every=1,
        run__keep_checkpoints=3,
        rollout__batch_size=4,
        reward__function="task/spread.py:reward",
        eval__datasets=[],
    )
    (folder / "task" / "spread.py").write_text(
        "def reward(sample):\n    return (sum(map(ord, sample.response)) % 7) / 7\n"
    )
    done = rollmill("train", config)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder / "run"


def rows(output: str) -> dict[str, list[str]]:
    """The table: metric → its figures."""
    lines = (line.split() for line in output.replace("│", " ").splitlines())
    return {parts[0]: parts[1:] for parts in lines if parts and "/" in parts[0]}


def test_a_step_replayed_as_it_was_gives_the_figures_of_the_run(run_dir: Path) -> None:
    done = rollmill("replay", run_dir, "2")
    assert done.returncode == 0, done.stderr
    assert "checkpoint of step 1, which the step started from" in done.stdout
    assert "cosine of both updates: 1.000000" in done.stdout
    (written,) = (r for r in metrics_of(run_dir, "train") if r["step"] == 2)
    table = rows(done.stdout)
    assert len(table) > 20
    for name in ("loss/total", "optimizer/grad_norm", "mismatch/log_prob_diff_mean"):
        first, second, third = table[name][:3]
        assert first == second == third == f"{written[f'train/{name}']:.6g}"


def test_another_loss_shows_what_it_changes(run_dir: Path) -> None:
    done = rollmill("replay", run_dir, "3", "trainer.algorithm.advantage=dr_grpo")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert len(table["reward/mean"]) == 3  # no difference
    assert float(table["advantage/max_abs"][3]) != 0
    cosine = re.search(r"cosine of both updates: ([\d.]+)", done.stdout)
    assert cosine is not None
    assert 0.5 < float(cosine[1]) < 1


def test_a_filter_takes_groups_away(run_dir: Path) -> None:
    done = rollmill("replay", run_dir, "1", "rollout.filters.max_mean_reward=0.45")
    kept = rows(done.stdout).get("groups/count")
    if kept is None:
        assert "leaves nothing to train on" in done.stderr
    else:
        assert float(kept[2]) <= float(kept[1]) == 4
    assert "the starting model, which the step started from" in done.stdout
    none = rollmill("replay", run_dir, "1", "rollout.filters.max_mean_reward=-1")
    assert none.returncode == 2
    assert "leaves nothing to train on" in none.stderr


def test_without_the_checkpoint_other_weights_are_named(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000002")
    done = rollmill("replay", copy, "3")
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 1, NOT those that the step started from" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["9"], r"a step from 1 to 3"),
        (["1", "rollout.batch_size=8"], r"it has happened already"),
        (["1", "trainer.algorithm.loss=cispoo"], r"did you mean cispo"),
        (["1", "trainer.algorithm.clip_hi=1"], r"did you mean `clip_high`"),
    ],
)
def test_mistakes_are_named(run_dir: Path, arguments: list[str], message: str) -> None:
    done = rollmill("replay", run_dir, *arguments)
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = rollmill("replay", tmp_path, "1")
    assert done.returncode == 2
    assert "this is no run folder" in done.stderr
