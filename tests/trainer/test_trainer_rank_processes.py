"""Two trainer processes started as a run starts them take the steps that one process takes."""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_testkit import make_group, tiny_llama

from rollmill.cluster.ranks import Worker
from rollmill.config import Config
from rollmill.errors import CheckpointError
from rollmill.loop.policy import Policy, start_trainer
from rollmill.loop.run_dir import RunDir
from rollmill.sample_codec import encode_group, encode_sample
from rollmill.trainer.replay import is_timing

ARGUMENTS: dict[str, Any] = {"reward_key": None, "max_new_tokens": 8, "temperature": 1.0}
NUM_STEPS = 3


NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


async def disk_full(trainer: Worker, folder: Path) -> None:
    """A state that cannot be written is an error of that call, and the ranks go on."""
    limits = resource.prlimit(trainer.pid or 0, resource.RLIMIT_FSIZE)
    resource.prlimit(trainer.pid or 0, resource.RLIMIT_FSIZE, (64, limits[1]))
    with pytest.raises(CheckpointError, match="state cannot be written"):
        await trainer.call("save", path=str(folder))
    resource.prlimit(trainer.pid or 0, resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_TWO_GPUS)])
def test_two_rank_processes_train_like_one(device: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    groups = [
        make_group(i, [1.0, 0.0, 0.5], rng=np.random.default_rng(i), log_prob=-4.0)
        for i in range(4)
    ]
    encoded = [encode_group(group) for group in groups]
    answers = [encode_sample(sample) for group in groups for sample in group.samples]

    async def train(num_ranks: int) -> tuple[list[dict[str, float]], list[bytes]]:
        folder = tmp_path / f"run{num_ranks}"
        config = Config.model_validate(
            {
                "model": {"path": str(tmp_path / "model")},
                "data": {"path": "unused.jsonl"},
                "trainer": {
                    "device": device,
                    "num_ranks": num_ranks,
                    "num_threads": 1,
                    "global_batch_size": 6,
                    "optimizer": {"lr": 1e-4, "eps": 1e-3},
                },
                "rollout": {"batch_size": 4, "n_samples_per_prompt": 3},
            }
        )
        policy = Policy(tmp_path / "model", None, 64)
        async with AsyncExitStack() as stack:
            trainer = await start_trainer(stack, config, policy, RunDir(folder), tmp_path)
            reports = [
                await trainer.call("train", groups=encoded, step=step, **ARGUMENTS)
                for step in range(NUM_STEPS)
            ]
            await trainer.call("save", path=str(folder / "state"))
            await trainer.call("write_weights", path=str(folder / "weights"), dtype="float32")
            await disk_full(trainer, folder / "nowhere")
            scores = await trainer.call("score", samples=answers, temperature=1.0)
        assert trainer.pid is None
        return reports, scores

    alone, alone_scores = asyncio.run(train(1))
    both, both_scores = asyncio.run(train(2))
    for first, second in zip(alone, both, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            if not is_timing(name) and not name.startswith("tokens/p"):
                assert second[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for file in ("weights/model.safetensors", "state/model.safetensors"):
        expected, found = (load_file(tmp_path / f"run{n}" / file) for n in (1, 2))
        assert expected.keys() == found.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        np.frombuffer(b"".join(both_scores), np.float32),
        np.frombuffer(b"".join(alone_scores), np.float32),
        atol=1e-5,
    )
