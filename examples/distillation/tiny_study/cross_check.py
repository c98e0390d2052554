"""One arm through the commands: engines, shards, manifest, a run, an export.

The other arms call rollmill's trainer in this process. Here the realizable student of seed 0
learns offline with `rollmill distill prepare`, `rollmill train` and `rollmill export`, and is
compared with repetitions in this process that differ from it, and from each other, in their draws
only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rollmill.distill.manifest import read_manifest
from rollmill.distill.measure import load_model
from tiny_study.arms import ARMS, LEARNING_RATE, OPD, run_arm
from tiny_study.learning import BATCHES_TOKENS, WARMUP_STEPS, measure
from tiny_study.models import Place
from tiny_study.pairs import material_of
from tiny_study.task import CONTEXT_LENGTH, MAX_NEW_TOKENS, write_prompts

SIZE, TEACHER = "realizable", "A"


def repeat_in_process(place: Place, draws: int) -> dict[str, Any]:
    """The offline arm once more, with other draws; its last measurement."""
    sizes = place.settings
    material = material_of(place, SIZE, TEACHER, TEACHER, draws)
    run = run_arm(
        ARMS["offline"],
        material,
        num_steps=sizes.mismatch_steps,
        marks=(sizes.mismatch_steps,),
        batch_size=sizes.batch_size,
    )
    point: dict[str, Any] = run["curve"][-1]
    return point


def run_commands(place: Place) -> dict[str, Any]:
    """The same arm with the commands; measured in the same way.

    The teacher and the student must be on the disk.
    """
    folder = place.folder / "commands"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_prompts(folder / "prompts.jsonl", place.prompts.training)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(place, folder), sort_keys=False), encoding="utf-8")
    seconds = {
        "prepare": _rollmill("distill", "prepare", config),
        "train": _rollmill("train", config),
        "export": _rollmill("export", folder / "run", folder / "exported"),
    }
    manifest = read_manifest(folder / "answers")
    teacher = load_model(place.teacher(TEACHER))
    seed = 30_000
    held_out = place.prompts.held_out
    steps = place.settings.mismatch_steps
    start = load_model(place.student(SIZE, TEACHER))
    after = load_model(folder / "exported")
    return {
        "start": asdict(measure(start, teacher, held_out, step=0, seed=seed)),
        "end": asdict(measure(after, teacher, held_out, step=steps, seed=seed)),
        "tokens_generated": manifest.generated_tokens,
        "tokens_scored": manifest.teacher_tokens,
        "seconds": seconds,
        "seconds_of_prepare": manifest.seconds,
    }


def _config(place: Place, folder: Path) -> dict[str, Any]:
    """What the in-process arm has, as a configuration."""
    sizes = place.settings
    teacher = str(place.teacher(TEACHER))
    return {
        "run": {"dir": str(folder / "run"), "num_steps": sizes.mismatch_steps, "save_every": 0},
        "model": {
            "path": str(place.student(SIZE, TEACHER)),
            "context_length": CONTEXT_LENGTH - 1,
        },
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {
            "batch_size": sizes.batch_size,
            "n_samples_per_prompt": 1,
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        },
        "engine": {"embedded": {"num_threads": 1, "max_running_requests": 256}},
        "opd": {
            "mode": "offline",
            "data": str(folder / "answers"),
            "teacher": {"path": teacher},
            "sft_teacher": teacher,
            "prepare": {"prompts_per_shard": 2048},
        },
        "trainer": {
            "num_threads": 1,
            "max_tokens_per_micro_batch": BATCHES_TOKENS,
            "algorithm": dict(OPD),
            "optimizer": {"lr": LEARNING_RATE, "warmup_steps": WARMUP_STEPS},
        },
    }


def _rollmill(*arguments: object) -> float:
    """Run one command; the seconds it took.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    started = time.perf_counter()
    finished = subprocess.run(
        [sys.executable, "-m", "rollmill.cli", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        command = " ".join(map(str, arguments))
        raise RuntimeError(f"rollmill {command} failed:\n{finished.stdout}\n{finished.stderr}")
    return time.perf_counter() - started
