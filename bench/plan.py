"""How well `rollmill plan` predicts: measured on half of a run, compared with the other half.

    python bench/plan.py [--steps 40] [--asynchronous] [--run RUN]

Without --run, a tiny model is warm-started and trained on this machine first (about a minute on one
idle core). The plan is fitted to the first half of the steps and predicts the mean step of the
second half, which it has not seen.

Expected on an idle machine: step time within 20 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from rollmill.config.load import load_config
from rollmill.plan.fit import fit
from rollmill.plan.schedule import mean_of
from rollmill.plan.setup import schedule_of
from rollmill.plan.simulate import simulate
from rollmill.telemetry.metrics_log import read_metrics
from support.tiny import warm_start
from support.tiny_run import quiet_environment, write_tiny_run

PHASES = ("step", "rollout", "train", "sync")


def make_run(folder: Path, num_steps: int, *, is_asynchronous: bool) -> Path:
    """Train the tiny model for so many steps; the run folder."""
    config = write_tiny_run(
        folder,
        run__num_steps=num_steps,
        rollout__asynchronous=is_asynchronous,
        eval__datasets=[],
        telemetry__console=False,
    )
    warm_start(folder / "model")
    command = [sys.executable, "-m", "rollmill.cli", "train", str(config)]
    subprocess.run(command, check=True, env=quiet_environment(), stdout=subprocess.DEVNULL)
    return folder / "run"


def compare(run: Path) -> dict[str, tuple[float, float]]:
    """Predicted and measured seconds of the second half's mean step, by phase."""
    records: list[dict[str, Any]] = list(read_metrics(run / "metrics.jsonl"))
    trained = [r for r in records if r["kind"] == "train"]
    half = trained[len(trained) // 2 - 1]["step"]
    later = [r for r in trained if r["step"] > half]
    schedule = schedule_of(load_config(run / "config.yaml"))
    measured = fit(run, schedule, last_step=half)
    mean = mean_of(simulate(schedule, measured.assumptions, num_steps=len(later) + 1))
    found = (mean.seconds, mean.rollout_s, mean.train_s, mean.sync_s)
    return {
        phase: (value, float(np.mean([r[f"time/{phase}_s"] for r in later])))
        for phase, value in zip(PHASES, found, strict=True)
    }


def main() -> None:
    """Run, fit, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--run", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = options.run or make_run(
            Path(scratch), options.steps, is_asynchronous=options.asynchronous
        )
        print(f"{'phase':<10}{'predicted':>12}{'measured':>12}{'error':>10}")
        for phase, (predicted, measured) in compare(run).items():
            error = predicted / measured - 1
            print(f"{phase:<10}{predicted:>10.3f} s{measured:>10.3f} s{error:>+10.1%}")


if __name__ == "__main__":
    main()
