"""Many steps with a fault every few: does the run finish, do the books balance, does it leak?

    python bench/soak.py [--steps 200] [--every 5] [--seed 0]

The tiny task of the tests with the real engine, trainer and reward workers, asynchronous with S = 2
and a checkpoint every 5 steps, once undisturbed and once with the whole list of faults: engines
killed, hung and slowed down, connections dropped, answers damaged, the trainer killed, the disk
full. The driver's memory, file descriptors and child processes are read once a second. The command
fails when anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report
from rollmill.telemetry.samples import read_samples
from support.processes import children_of, num_open_files, processes_of, resident_bytes
from support.tiny import warm_start
from support.tiny_run import metrics_of, start_rollmill, write_tiny_run

GROUPS = 16
REWARD_BAND = 0.08
"""How far the final pass@1 of the disturbed run may be below the undisturbed one's."""
MEMORY_GROWTH, FILE_GROWTH = 1.25, 8
MEGABYTE = 1 << 20


@dataclass
class Watch:
    """What the driver held, second by second."""

    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        """Read once; a process that ends meanwhile is skipped."""
        try:
            memory, files = resident_bytes(pid), num_open_files(pid)
        except OSError:
            return
        self.memory.append(memory)
        self.files.append(files)
        self.children.append(len(children_of(pid)))

    def growth(self, values: list[int]) -> tuple[float, float]:
        """Highest of the first half and of the last quarter, once the run was under way."""
        half, quarter = max(1, len(values) // 2), max(1, len(values) // 4)
        return max(values[:half]), max(values[-quarter:])


def soak(folder: Path, *, steps: int, seed: int, every: int) -> tuple[Watch, float]:
    """One run, watched; its final pass@1."""
    config = write_tiny_run(
        folder,
        seed=seed,
        model_size=(128, 4),
        run__num_steps=steps,
        run__save_every=5,
        run__stall_timeout_s=120.0,
        run__on_stall="retry",
        rollout__batch_size=GROUPS,
        rollout__asynchronous=True,
        rollout__max_staleness=2,
        engine__health_interval_s=1.0,
        engine__health_timeout_s=5.0,
        engine__health_strikes=2,
        faults={"every": every, "seed": seed},
    )
    warm_start(folder / "model")
    watch = Watch()
    with (folder / "output.log").open("w") as output:
        driver = start_rollmill("train", config, stdout=output)
        while driver.poll() is None:
            if num_steps_done(folder / "run") >= steps // 10:  # start-up is over
                watch.look(driver.pid)
            time.sleep(1.0)
    if driver.returncode:
        raise SystemExit((folder / "output.log").read_text())
    return watch, metrics_of(folder / "run", "eval")[-1]["eval/sorted/pass@1"]


def num_steps_done(run: Path) -> int:
    """Steps that the run has written down."""
    return len(metrics_of(run, "train")) if (run / "metrics.jsonl").is_file() else 0


def check_books(run: Path, steps: int) -> dict[str, Any]:
    """Every step once, every prompt once, nothing in flight; what the ledger says."""
    assert [r["step"] for r in metrics_of(run, "train")] == list(range(1, steps + 1))
    groups = []
    for step in range(1, steps + 1):
        samples = read_samples(run / "samples" / f"step_{step:06d}.parquet")
        assert all(step - 1 - s.oldest_version <= 2 for s in samples), f"step {step}: too old"
        groups.append({s.group_index for s in samples})
    assert len(set().union(*groups)) == sum(map(len, groups)), "a prompt was trained on twice"
    report = read_report(run / "ledger.sqlite")
    assert report.balance[State.CONSUMED] == steps * GROUPS
    assert report.balance[State.IN_FLIGHT] == 0
    assert sum(report.balance.values()) == report.num_issued
    return {str(state): number for state, number in report.balance.items() if number}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scores = {}
    for name, every in (("undisturbed", 0), ("disturbed", options.every)):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            started = time.monotonic()
            watch, scores[name] = soak(folder, steps=options.steps, seed=options.seed, every=every)
            books = check_books(folder / "run", options.steps)
            left = processes_of(folder)
            log = folder / "run" / "faults.jsonl"
            lines = log.read_text().splitlines() if every else []
        print(f"{name}: {options.steps} steps in {time.monotonic() - started:.0f} s, "
              f"pass@1 {scores[name]:.3f}, books {books}")  # fmt: skip
        print(f"  faults: {dict(Counter(json.loads(line)['kind'] for line in lines))}")
        memory, files = watch.growth(watch.memory), watch.growth(watch.files)
        print(f"  driver's memory {memory[0] / MEGABYTE:.0f} → {memory[1] / MEGABYTE:.0f} MB, "
              f"files {files[0]:.0f} → {files[1]:.0f}, children at most {max(watch.children)}, "
              f"processes left: {len(left)}", flush=True)  # fmt: skip
        assert not left, left
        assert memory[1] <= MEMORY_GROWTH * memory[0], "the driver's memory grows"
        assert files[1] <= files[0] + FILE_GROWTH, "file descriptors leak"
    assert scores["disturbed"] >= scores["undisturbed"] - REWARD_BAND, scores
    print("all as it should be")


if __name__ == "__main__":
    main()
