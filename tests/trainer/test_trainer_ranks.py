"""One, two and four ranks take the same step, and write files that one rank can read."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from trainer_testkit import (
    ARGUMENTS,
    first_gradients,
    learner,
    make_group,
    mixed_groups,
    tiny_llama,
)

from rollmill.config.trainer import LoraConfig, TrainerConfig
from rollmill.sample import Group
from rollmill.sample_codec import encode_group, encode_sample
from rollmill.trainer.ranks import Ranks, spread
from rollmill.trainer.worker import TorchTrainer

LLAMA_MODULE = "transformers.models.llama.modeling_llama"
"""Imported once by the fork server, not by every process."""

CASES: list[dict[str, Any]] = [
    {"algorithm": {}, "max_tokens_per_micro_batch": 30},
    {
        "algorithm": {
            "loss": "gspo",
            "kl_coef": 0.1,
            "entropy_coef": 0.01,
            "aggregation": "per_token",
        },
        "reference": True,
    },
    {
        "algorithm": {"advantage": "ppo", "gae_lambda": 0.9},
    },
    {  # rank 3: no number of ranks but 3 divides it
        "algorithm": {"loss": "cispo", "entropy_coef": 0.01},
        "lora": LoraConfig(rank=3, alpha=6),
    },
]


def case(number: int) -> tuple[dict[str, Any], list[Group]]:
    return CASES[number], mixed_groups(np.random.default_rng(7))


def step(number: int, ranks: Ranks | None) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    changes, groups = case(number)
    how = learner(ranks=ranks, **changes)
    return how.learn(groups, **ARGUMENTS), first_gradients(how)


WORKERS: dict[str, dict[str, Any]] = {
    "full": {},
    # The reference is scored before the first gradient, by the same model with its adapters off.
    "lora": {
        "lora": {"rank": 3, "alpha": 6},
        "algorithm": {"kl_coef": 0.1},
        "activation_checkpointing": True,
    },
}
"""What changes the trainer's settings, by the folder its files go to."""


def trainer(folder: Path, kind: str, **place: Any) -> TorchTrainer:
    settings = {
        "device": "cpu",
        "num_threads": 1,
        "optimizer": {"lr": 1e-3, "eps": 1e-3},
        **WORKERS[kind],
    }
    config = TrainerConfig.model_validate(settings)
    return TorchTrainer(
        config=config.model_dump(mode="json"),
        model_path=str(folder / "model"),
        seed=0,
        num_total_steps=3,
        context_length=64,
        **place,
    )


def use_worker(which: TorchTrainer, folder: Path) -> list[bytes]:
    """Train, save, load, train, write, export: files are in `folder`, the scores come back."""
    groups = [make_group(i, [1.0, 0.0], rng=np.random.default_rng(i)) for i in range(3)]
    encoded = [encode_group(group) for group in groups]
    arguments: dict[str, Any] = {"reward_key": None, "max_new_tokens": 8, "temperature": 1.0}
    which.train(encoded, step=0, **arguments)
    which.save(str(folder / "state"))
    which.train(encoded, step=1, **arguments)
    which.load(str(folder / "state"))
    which.train(encoded, step=1, **arguments)
    which.write_weights(str(folder / "weights"), dtype="float32")
    which.export(str(folder / "export"))
    return which.score([encode_sample(s) for g in groups for s in g.samples], temperature=1.0)


def one_rank(rank: int, size: int, folder: Path) -> None:
    """What each process does; rank 0 leaves the results in files."""
    torch.set_num_threads(1)
    place = {"rank": rank, "num_ranks": size}
    for kind in WORKERS:
        meeting = f"file://{folder}/rendezvous_{kind}"
        which = trainer(folder, kind, **place, rendezvous=meeting)
        scores = use_worker(which, folder / kind)
        (folder / kind / f"scores_{rank}.bin").write_bytes(b"".join(scores))
        which.close()
    ranks = Ranks(rank, size, rendezvous=f"file://{folder}/rendezvous")
    for number in range(len(CASES)):
        metrics, gradients = step(number, ranks)
        if rank == 0:
            save_file(gradients, folder / f"gradients_{number}.safetensors")
            (folder / f"metrics_{number}.json").write_text(json.dumps(metrics))
    ranks.close()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_the_step_that_one_rank_takes(size: int, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tiny_llama().save_pretrained(tmp_path / "model")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollmill.trainer.worker", LLAMA_MODULE])
    processes = [
        context.Process(target=one_rank, args=(rank, size, tmp_path)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size

    for number in range(len(CASES)):
        assert_same_step(number, tmp_path)
    for kind in WORKERS:
        assert_same_files(kind, size, tmp_path)


def assert_same_step(number: int, folder: Path) -> None:
    metrics, gradients = step(number, None)
    found = load_file(folder / f"gradients_{number}.safetensors")
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-6, f"{name} has no gradient to compare"
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
    theirs = json.loads((folder / f"metrics_{number}.json").read_text())
    assert theirs.keys() == metrics.keys()
    for name, value in metrics.items():
        if "second" not in name and name not in ("tokens/positions", "tokens/padding_share"):
            assert theirs[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


def assert_same_files(kind: str, size: int, folder: Path) -> None:
    alone = folder / f"alone_{kind}"
    alone.mkdir()
    (alone / "model").symlink_to(folder / "model")
    expected_scores = b"".join(use_worker(trainer(alone, kind), alone))
    for file in ("weights", "state", "export"):
        path = f"{file}/model.safetensors"
        expected, written = load_file(alone / path), load_file(folder / kind / path)
        assert expected.keys() == written.keys()
        for name in expected:
            torch.testing.assert_close(written[name], expected[name], rtol=1e-4, atol=1e-5)
    start = load_file(folder / "model" / "model.safetensors")
    moved = load_file(folder / kind / "weights" / "model.safetensors")
    assert any((moved[name] - tensor).abs().max() > 1e-4 for name, tensor in start.items())
    for rank in range(size):
        scores = np.frombuffer((folder / kind / f"scores_{rank}.bin").read_bytes(), np.float32)
        np.testing.assert_allclose(scores, np.frombuffer(expected_scores, np.float32), atol=1e-4)
    trainer(alone, kind).load(str(folder / kind / "state"))


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_work_is_spread_once_and_evenly(costs: list[int], num_ranks: int) -> None:
    shares = spread(costs, num_ranks)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    loads = [sum(costs[item] for item in share) for share in shares]
    assert max(loads) <= sum(costs) / num_ranks + max(costs, default=0)
