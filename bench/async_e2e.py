"""A real run, end to end: does writing ahead of the trainer learn the same, and how much sooner?

    python bench/async_e2e.py [--steps 60] [--seeds 0]

The tiny task of the tests (sort four digits; 1 million parameters, warm-started by imitation) with
the real engine and the real trainer, each in a process of its own with one CPU thread, so that two
cores can work at once. In turns, one of them waits for the other; a second row in turns gives each
of them both cores. `seconds` is from the end of the first step to the end of the last.

`age` is measured in what was trained: weight versions between the oldest token of an answer and the
weights that the step started from. No row may exceed its bound S.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rollmill.telemetry.samples import read_samples
from support.tiny import warm_start
from support.tiny_run import metrics_of, rollmill, write_tiny_run

AHEAD = {
    "rollout__asynchronous": True,
    "trainer__algorithm": {"importance_correction": "truncate"},
}
BOTH_CORES = {"engine__embedded": {"max_running_requests": 256}, "trainer__num_threads": 2}
ROWS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("in turns", 0, {}),
    ("in turns, 2 threads", 0, BOTH_CORES),
    ("S = 0", 0, {"rollout__asynchronous": True}),
    ("S = 1", 1, AHEAD),
    ("S = 4", 4, AHEAD),
    ("S = 1, uncorrected", 1, {"rollout__asynchronous": True}),
    ("S = 4, uncorrected", 4, {"rollout__asynchronous": True}),
)


def train(folder: Path, staleness: int, steps: int, seed: int, changes: dict[str, Any]) -> Path:
    """One run; its folder."""
    config = write_tiny_run(
        folder,
        seed=seed,
        model_size=(128, 4),
        run__num_steps=steps,
        rollout__max_staleness=staleness,
        **changes,
    )
    warm_start(folder / "model")
    finished = rollmill("train", config, timeout=3600)
    if finished.returncode:
        raise SystemExit(finished.stdout + finished.stderr)
    return folder / "run"


def ages(run: Path, steps: int) -> list[int]:
    """Age of every trained answer."""
    found = []
    for step in range(1, steps + 1):
        for sample in read_samples(run / "samples" / f"step_{step:06d}.parquet"):
            if sample.oldest_version is not None:
                found.append(step - 1 - sample.oldest_version)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    print(f"{options.steps} steps, seeds {options.seeds}")
    print(f"{'':<22}{'seconds':>8}{'ratio':>7}{'pass@1 before':>15}{'after':>7}"
          f"{'mean age':>10}{'max age':>9}")  # fmt: skip
    in_turns: dict[int, float] = {}
    for seed in options.seeds:
        for name, staleness, changes in ROWS:
            with tempfile.TemporaryDirectory() as folder:
                run = train(Path(folder), staleness, options.steps, seed, changes)
                trained, evaluated = metrics_of(run, "train"), metrics_of(run, "eval")
                all_ages = ages(run, options.steps)
            seconds = trained[-1]["time"] - trained[0]["time"]
            in_turns.setdefault(seed, seconds)
            scores = [record["eval/sorted/pass@1"] for record in evaluated]
            print(
                f"{name:<22}{seconds:>8.1f}{in_turns[seed] / seconds:>7.2f}{scores[0]:>15.3f}"
                f"{scores[-1]:>7.3f}{sum(all_ages) / len(all_ages):>10.2f}{max(all_ages):>9}",
                flush=True,
            )
            if max(all_ages) > staleness:
                raise SystemExit(f"{name}: the bound was exceeded")


if __name__ == "__main__":
    main()
