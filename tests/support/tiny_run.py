"""A whole run with the tiny model: files, configuration and the command that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from support.tiny import CONTEXT_LENGTH, MAX_NEW_TOKENS, make_tiny_model, write_task_files


def write_tiny_run(
    folder: Path, *, seed: int = 0, model_size: tuple[int, int] = (96, 3), **changes: Any
) -> Path:
    """Model (not warm-started), task files and `config.yaml` in `folder`; the config's path.

    Args:
        folder: created when missing.
        seed: of model, data and run.
        model_size: hidden size and layers.
        changes: `section__field=value` over the defaults below.
    """
    model = make_tiny_model(folder / "model", seed, hidden_size=model_size[0], layers=model_size[1])
    write_task_files(folder / "task", seed)
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "num_steps": 60, "seed": seed, "save_every": 0},
        "model": {"path": str(model), "context_length": CONTEXT_LENGTH},
        "data": {"path": "task/train.jsonl"},
        "rollout": {
            "batch_size": 32,
            "n_samples_per_prompt": 8,
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        },
        "reward": {"function": "task/reward.py:reward"},
        "engine": {"embedded": {"num_threads": 1, "max_running_requests": 256}},
        "trainer": {"num_threads": 1, "optimizer": {"lr": 3e-4}},
        "eval": {"datasets": [{"name": "sorted", "data": {"path": "task/eval.jsonl"}}]},
    }
    for name, value in changes.items():
        *sections, field = name.split("__")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[field] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def rollmill(*arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would; output is captured."""
    return subprocess.run(
        [sys.executable, "-m", "rollmill.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=quiet_environment(),
        check=False,
    )


def start_rollmill(*arguments: str | Path, stdout: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start the command line and leave it running."""
    return subprocess.Popen(
        [sys.executable, "-m", "rollmill.cli", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        env=quiet_environment(),
    )


def quiet_environment() -> dict[str, str]:
    """One thread, no network, a wide terminal."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}


def metrics_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]
