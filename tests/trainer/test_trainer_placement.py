"""Memory that goes to the CPU between training steps and comes back the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_testkit import make_group, tiny_llama

from rollmill.config.trainer import TrainerConfig
from rollmill.sample_codec import encode_group
from rollmill.trainer.placement import move_moments
from rollmill.trainer.worker import TorchTrainer

SaveModel = Callable[..., str]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def trainer(model_path: str, device: str) -> TorchTrainer:
    values = {
        "num_threads": 1,
        "device": device,
        "optimizer": {"lr": 1e-2},
        "algorithm": {"kl_coef": 0.1},
    }
    return TorchTrainer(
        config=TrainerConfig.model_validate(values).model_dump(mode="json"),
        model_path=model_path,
        seed=0,
        num_total_steps=6,
        context_length=256,
    )


def train(which: TorchTrainer, step: int) -> None:
    rng = np.random.default_rng(step)
    groups = [encode_group(make_group(i, [1.0, 0.0, 0.5], rng=rng)) for i in range(2)]
    which.train(groups, step=step, reward_key=None, max_new_tokens=8, temperature=1.0)


def weights(which: TorchTrainer, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    which.write_weights(str(folder), dtype="float32")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("device", DEVICES)
def test_training_between_offloads_is_training_without(
    save_model: SaveModel, tmp_path: Path, device: str
) -> None:
    path = save_model(tiny_llama())
    plain, moved = trainer(path, device), trainer(path, device)
    moved.offload()
    for step in (1, 2):
        train(plain, step)
        moved.onload()
        train(moved, step)
        moved.offload()
    expected = weights(plain, tmp_path / "plain")
    found = weights(moved, tmp_path / "moved")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    moved.save(str(tmp_path / "state"))
    again = trainer(path, device)
    again.offload()
    again.load(str(tmp_path / "state"))
    for which in (plain, moved, again):
        train(which, 3)
    expected = weights(plain, tmp_path / "plain_3")
    for name, which in (("moved_3", moved), ("again_3", again)):
        found = weights(which, tmp_path / name)
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_offloaded_trainer_holds_no_device_memory(save_model: SaveModel) -> None:
    which = trainer(save_model(tiny_llama()), "cuda")
    train(which, 1)
    before = torch.cuda.memory_allocated()
    which.offload()
    assert torch.cuda.memory_allocated() < before / 10


def test_moments_move_and_step_counts_stay() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    move_moments(optimizer, torch.device("meta"))
    state: dict[str, Any] = optimizer.state[weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
