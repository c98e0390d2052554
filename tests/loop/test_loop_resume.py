"""A killed run goes on as if nothing had happened."""

import os
import pty
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from rollmill.cli_process import SAME_REQUEST_S
from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report
from rollmill.telemetry.samples import read_samples
from support.processes import processes_of
from support.tiny import make_tiny_model
from support.tiny_run import metrics_of, rollmill, start_rollmill, write_tiny_run

SMALL = {
    "run__num_steps": 6,
    "run__save_every": 2,
    "rollout__batch_size": 4,
    "rollout__n_samples_per_prompt": 4,
    "eval__datasets": [],
}
EVALUATION = [{"name": "sorted", "data": {"path": "task/eval.jsonl"}}]
STEADY = ("reward/mean", "rollout/response_tokens", "train/loss/total", "train/optimizer/grad_norm")


def wait_for_step(run: Path, step: int, deadline_s: float = 120) -> None:
    end = time.monotonic() + deadline_s
    path = run / "metrics.jsonl"
    while time.monotonic() < end:
        if path.exists() and any(r["step"] >= step for r in metrics_of(run, "train")):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached in {deadline_s} s")


def trained_prompts(run: Path, steps: int) -> list[list[tuple[int, int]]]:
    return [
        [
            (s.group_index, s.attempt)
            for s in read_samples(run / "samples" / f"step_{step:06d}.parquet")
        ]
        for step in range(1, steps + 1)
    ]


def test_a_killed_run_goes_on_from_its_checkpoint_and_ends_as_if_undisturbed(
    tmp_path: Path,
) -> None:
    undisturbed = write_tiny_run(tmp_path / "a", **SMALL)
    assert rollmill("train", undisturbed).returncode == 0
    disturbed = write_tiny_run(tmp_path / "b", **SMALL)
    run = tmp_path / "b" / "run"

    driver = start_rollmill("train", disturbed)
    wait_for_step(run, 3)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    again = rollmill("train", disturbed)

    assert again.returncode == 0, again.stderr
    assert "resumed after step" in again.stdout
    a, b = metrics_of(tmp_path / "a" / "run", "train"), metrics_of(run, "train")
    assert [r["step"] for r in b] == [1, 2, 3, 4, 5, 6]
    for name in STEADY:
        assert [r[name] for r in a] == [r[name] for r in b], name
    assert trained_prompts(run, 6) == trained_prompts(tmp_path / "a" / "run", 6)
    report = read_report(run / "ledger.sqlite")
    assert report.balance[State.CONSUMED] == report.num_issued == 6 * 4


def test_sigterm_saves_after_the_step_and_the_same_command_goes_on(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, **{**SMALL, "run__num_steps": 400, "run__save_every": 0})
    run = tmp_path / "run"

    driver = start_rollmill("train", config)
    wait_for_step(run, 1)
    driver.send_signal(signal.SIGTERM)
    driver.send_signal(signal.SIGTERM)  # as `timeout` does: to the process, and to its group
    output, _ = driver.communicate(timeout=60)

    assert driver.returncode == 0, output
    assert "stopped and saved" in output
    done = metrics_of(run, "train")[-1]["step"]
    assert done < 400
    again = rollmill("train", config, f"run.num_steps={done + 1}")
    assert f"resumed after step {done}" in again.stdout
    assert [r["step"] for r in metrics_of(run, "train")] == list(range(1, done + 2))


def test_a_run_that_is_told_to_stop_leaves_the_evaluation_to_the_one_that_goes_on(
    tmp_path: Path,
) -> None:
    config = write_tiny_run(
        tmp_path,
        **{**SMALL, "run__num_steps": 400, "run__save_every": 0, "eval__datasets": EVALUATION},
        eval__every=1,
        eval__at_start=False,
    )
    run = tmp_path / "run"

    driver = start_rollmill("train", config)
    wait_for_step(run, 1)
    driver.send_signal(signal.SIGTERM)
    output, _ = driver.communicate(timeout=60)

    assert driver.returncode == 0, output
    done = metrics_of(run, "train")[-1]["step"]
    assert (run / "checkpoints" / f"step_{done:06d}" / "manifest.json").exists()
    again = rollmill("train", config, f"run.num_steps={done + 1}")
    assert again.returncode == 0, again.stderr
    assert [r["step"] for r in metrics_of(run, "eval")] == list(range(1, done + 2))


def test_a_terminal_that_goes_away_ends_the_run_after_the_step_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # no live line: nobody reads here, and little has room
    config = write_tiny_run(tmp_path, **{**SMALL, "run__num_steps": 400, "run__save_every": 0})
    run = tmp_path / "run"
    terminal, theirs = pty.openpty()

    driver = start_rollmill("train", config, stdout=theirs)
    os.close(theirs)
    wait_for_step(run, 1)
    os.close(terminal)
    driver.send_signal(signal.SIGHUP)
    driver.send_signal(signal.SIGHUP)  # from the kernel, and from the shell
    driver.wait(timeout=60)

    assert driver.returncode == 0
    done = metrics_of(run, "train")[-1]["step"]
    assert done < 400
    assert (run / "checkpoints" / f"step_{done:06d}" / "manifest.json").exists()
    assert processes_of(tmp_path) == []


def test_two_processes_cannot_work_in_one_run_folder(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, **{**SMALL, "run__num_steps": 400})
    driver = start_rollmill("train", config)
    wait_for_step(tmp_path / "run", 1)

    second = rollmill("train", config)

    driver.kill()
    driver.communicate()
    assert second.returncode == 2
    assert "another process is working in this run folder" in second.stderr


HANGS_IN_STEP_2 = """
import asyncio

async def generate(sample, context):
    if context.step == 2:
        await asyncio.Event().wait()
    return await context.extend(sample)
"""


def test_a_second_sigterm_stops_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, **SMALL)
    (tmp_path / "hang.py").write_text(HANGS_IN_STEP_2)
    run = tmp_path / "run"

    driver = start_rollmill("train", config, "rollout.hooks.generate=hang.py:generate")
    wait_for_step(run, 1)
    driver.send_signal(signal.SIGTERM)
    assert driver.stdout is not None
    for line in driver.stdout:
        if "stopping after this step" in line:
            break
    time.sleep(SAME_REQUEST_S + 0.1)  # sooner it would count as the same request
    driver.send_signal(signal.SIGTERM)
    output, _ = driver.communicate(timeout=60)

    assert driver.returncode == 130, output
    assert "stopped" in output
    assert processes_of(tmp_path) == []
    assert [r["step"] for r in metrics_of(run, "train")] == [1]


def test_a_run_that_stalls_ends_with_what_blocks_it_when_it_is_told_to(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, **SMALL, run__on_stall="stop", run__stall_timeout_s=10.0)
    (tmp_path / "hang.py").write_text(HANGS_IN_STEP_2)

    stalled = rollmill("train", config, "rollout.hooks.generate=hang.py:generate")

    assert stalled.returncode == 2
    assert "no request, judgement or answer has finished for" in stalled.stderr
    assert "group 4: generate function of sample 16 (attempt 0) for" in stalled.stderr
    assert "engines: http://127.0.0.1" in stalled.stderr
    assert [r["step"] for r in metrics_of(tmp_path / "run", "train")] == [1]
    assert processes_of(tmp_path) == []


def test_a_trainer_that_dies_ends_the_run_when_restarts_are_off_and_the_command_goes_on(
    tmp_path: Path,
) -> None:
    faults = {"every": 4, "kinds": ["trainer_kill"]}
    config = write_tiny_run(tmp_path, **SMALL, run__max_restarts=0, faults=faults)

    died = rollmill("train", config)

    assert died.returncode == 2
    assert "the trainer process is gone" in died.stderr
    assert "killed by signal SIGKILL" in died.stderr
    again = rollmill("train", config)
    assert again.returncode == 0, again.stderr
    assert "resumed after step 2" in again.stdout
    run = tmp_path / "run"
    assert [r["step"] for r in metrics_of(run, "train")] == [1, 2, 3, 4, 5, 6]
    assert read_report(run / "ledger.sqlite").balance[State.CONSUMED] == 6 * 4


def test_a_start_with_another_model_fails_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, **{**SMALL, "run__num_steps": 1})
    assert rollmill("train", config).returncode == 0
    run = tmp_path / "run"
    before = (run / "config.yaml").read_bytes()
    other = make_tiny_model(tmp_path / "other", hidden_size=32, layers=1)

    failed = rollmill("train", config, f"model.path={other}", "run.num_steps=2")

    assert failed.returncode == 2
    assert "use the model the run was started with" in failed.stderr
    assert (run / "config.yaml").read_bytes() == before
    assert rollmill("export", run, tmp_path / "exported").returncode == 0


def test_groups_of_the_checkpoint_are_trained_on_when_another_number_of_answers_is_asked_for(
    tmp_path: Path,
) -> None:
    config = write_tiny_run(
        tmp_path,
        **{**SMALL, "run__num_steps": 1},
        rollout__over_sampling_batch_size=8,
        trainer__global_batch_size=16,
    )
    assert rollmill("train", config).returncode == 0

    again = rollmill(
        "train",
        config,
        "run.num_steps=3",
        "rollout.n_samples_per_prompt=6",
        "trainer.global_batch_size=24",
    )

    assert again.returncode == 0, again.stderr
    assert "resumed after step 1" in again.stdout
    sizes = [
        Counter(
            s.group_index for s in read_samples(tmp_path / f"run/samples/step_{step:06d}.parquet")
        )
        for step in (1, 2, 3)
    ]
    assert [len(groups) for groups in sizes] == [4, 4, 4]
    assert 4 in sizes[1].values(), "a group of the checkpoint"
    assert set(sizes[2].values()) <= {4, 6}
    assert sum(sizes[1].values()) % 24, "a batch that does not divide"
    records = metrics_of(tmp_path / "run", "train")
    assert [r["train/optimizer/steps"] for r in records] == [1, 1, 1]
    times = {name for record in records for name in record if name.startswith("time/")}
    assert times == {f"time/{part}_s" for part in ("rollout", "train", "sync", "step")}
    log = (tmp_path / "run" / "logs" / "driver.log").read_text(encoding="utf-8")
    assert re.search(r"saved the checkpoint of step 3 in \d+\.\d s", log)
