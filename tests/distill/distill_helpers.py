"""Configurations of distillations between tiny models, and ways to spoil recorded answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaForCausalLM

from rollmill.config import Config
from rollmill.config.engine import EmbeddedEngineConfig, EngineConfig
from rollmill.config.load import parse_config
from rollmill.distill.manifest import Manifest
from rollmill.distill.recorded import RecordedSource
from rollmill.loop.distill import open_recorded_source, prepare_answers
from rollmill.loop.policy import open_policy
from support.tiny import MAX_NEW_TOKENS, TaskFiles

ENGINE = EngineConfig(start_timeout_s=120, embedded=EmbeddedEngineConfig(num_threads=1))
NUM_PROMPTS, PER_SHARD, ANSWERS = 48, 16, 2


@dataclass(frozen=True)
class World:
    root: Path
    student: Path
    teacher: Path
    files: TaskFiles
    student_url: str
    teacher_url: str


def plain_config(world: World, **changes: Any) -> dict[str, Any]:
    """An offline distillation; `section__field=value` changes it."""
    values: dict[str, Any] = {
        "run": {"dir": str(world.root / "run"), "num_steps": 4, "save_every": 0},
        "model": {"path": str(world.student)},
        "data": {"path": str(world.files.train)},
        "rollout": {
            "batch_size": 8,
            "n_samples_per_prompt": ANSWERS,
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        },
        "engine": {"urls": [world.student_url]},
        "trainer": {
            "num_threads": 1,
            "optimizer": {"lr": 3e-4},
            "algorithm": {"advantage": "none", "loss": "policy_gradient"},
        },
        "opd": {
            "mode": "offline",
            "data": str(world.root / "prepared"),
            "teacher": {"url": world.teacher_url},
            "sft_teacher": str(world.teacher),
            "prepare": {"num_prompts": NUM_PROMPTS, "prompts_per_shard": PER_SHARD},
        },
    }
    for name, value in changes.items():
        *sections, field = name.split("__")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[field] = value
    return values


def config_of(world: World, **changes: Any) -> Config:
    return parse_config(plain_config(world, **changes), where="the test")


def prepare_now(world: World, config: Config) -> Manifest:
    return asyncio.run(prepare_answers(config, base_dir=world.root))


def open_answers(world: World, folder: Path, **changes: Any) -> RecordedSource:
    config = config_of(world, opd__data=str(folder), **changes)
    return open_recorded_source(config, open_policy(config))


def spoil(folder: Path, change: Callable[[list[dict[str, Any]]], object], shard: int = 1) -> Path:
    """Change the rows of a shard as `change` does, in place; the file's path."""
    path = folder / f"shard_{shard:05d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return path


@torch.no_grad()
def brute_force(model_folder: Path, prompt: list[int], response: list[int]) -> list[float]:
    """Log-prob of each response token from a forward pass of its own over all before it."""
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    scores = []
    for place, token in enumerate(response):
        context = torch.tensor([[*prompt, *response[:place]]])
        scores.append(float(torch.log_softmax(model(context).logits[0, -1].double(), -1)[token]))
    return scores
