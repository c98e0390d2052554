"""SmolLM2 and the same model after GRPO: the second teaches the first from recorded answers.

    python examples/distillation/smollm2.py            the whole thing, from nothing
    python examples/distillation/smollm2.py --teacher FOLDER   with a teacher that is there already

The teacher is the result of `examples/extract_json`, trained and exported here when none is given.
Then: record the student's answers, train on them, and compare before and after: the reverse KL to
the teacher on fresh answers to held-out prompts, and the accuracy on them. Further arguments change
the configuration of the distillation (`opd.prepare.num_prompts=64 run.num_steps=3`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "extract_json"
CONFIG = HERE / "smollm2.yaml"
NUM_MEASURED = 128


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, help="an exported model, instead of training one")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    overrides = list(arguments.overrides)
    if not (EXAMPLE / "data" / "train.jsonl").exists():
        subprocess.run([sys.executable, EXAMPLE / "make_data.py"], check=True)
    if arguments.teacher is not None:
        overrides.append(f"opd.teacher.path={arguments.teacher}")
    else:
        train_teacher(config_of(overrides))
    seconds = {}
    for name, command in (("prepare", ["distill", "prepare"]), ("train", ["train"])):
        started = time.monotonic()
        rollmill(*command, CONFIG, *overrides)
        seconds[name] = time.monotonic() - started
    report(overrides, seconds)


def train_teacher(config: Any) -> None:
    """GRPO as in examples/extract_json, exported to where the distillation looks for it."""
    folder = Path(config.opd.teacher.path)
    if (folder / "config.json").exists():
        return
    run = folder.with_name(f"{folder.name}_run")
    rollmill("train", EXAMPLE / "config.yaml", f"run.dir={run}")
    rollmill("export", run, folder)


def rollmill(*arguments: object) -> None:
    """One command, shown."""
    command = [sys.executable, "-m", "rollmill.cli", *map(str, arguments)]
    print("$ rollmill", *arguments, flush=True)
    subprocess.run(command, check=True)


def config_of(overrides: Sequence[str]) -> Any:
    """The configuration of the distillation."""
    from rollmill.config.load import load_config

    return load_config(CONFIG, overrides)


def report(overrides: Sequence[str], seconds: dict[str, float]) -> None:
    """Measure, print a table, and write it as JSON into the run folder."""
    from rollmill.distill.manifest import read_manifest
    from rollmill.models import resolve_model

    config = config_of(overrides)
    exported = Path(config.run.dir) / "exported"
    if not exported.exists():
        rollmill("export", config.run.dir, exported)
    student = resolve_model(config.model.path)
    teacher = resolve_model(config.opd.teacher.path)
    evals = [record for record in records(config.run.dir) if record["kind"] == "eval"]
    name = "eval/held_out/pass@1"
    manifest = read_manifest(config.opd.data)
    result = {
        "accuracy": {
            "student": evals[0][name],
            "distilled": evals[-1][name],
            "teacher": accuracy(config, teacher, overrides)[name],
        },
        "reverse_kl_per_answer": {
            "student": divergence(config, student, teacher),
            "distilled": divergence(config, exported, teacher),
        },
        "tokens_generated": manifest.generated_tokens,
        "seconds": {**seconds, **{f"prepare/{k}": v for k, v in manifest.seconds.items()}},
    }
    text = json.dumps(result, indent=2)
    (Path(config.run.dir) / "distillation.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def accuracy(config: Any, model: Path, overrides: Sequence[str]) -> dict[str, float]:
    """The held-out set answered by another model."""
    from rollmill.config.load import load_config
    from rollmill.loop.evaluate import evaluate
    from rollmill.telemetry.console import RunView

    place = f"run.dir={config.run.dir}/teacher_eval"
    changes = [*overrides, f"model.path={model}", place, "opd.mode=off"]
    settings = load_config(CONFIG, changes)
    with RunView(is_on=False, num_steps=1) as view:
        return asyncio.run(evaluate(settings, base_dir=HERE, view=view)).metrics


def divergence(config: Any, student: Path, teacher: Path) -> dict[str, float]:
    """Exact reverse KL in the states of fresh answers to held-out prompts."""
    from rollmill.data import load_rows, load_tokenizer
    from rollmill.distill.measure import load_model, reverse_kl
    from rollmill.models import end_ids_of

    rows = load_rows(
        config.eval.datasets[0].data,
        tokenizer=load_tokenizer(teacher),
        context_length=config.model.context_length,
        base_dir=HERE,
    )
    measured = reverse_kl(
        load_model(student),
        load_model(teacher),
        [row.prompt_tokens.tolist() for row in rows[:NUM_MEASURED]],
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        end_ids=end_ids_of(teacher),
        batch_size=32,
    )
    return {"mean": measured.per_answer, "standard_error": measured.standard_error}


if __name__ == "__main__":
    main()
