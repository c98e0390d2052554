"""The trainer on a GPU is the trainer on a CPU; the kernel for packed rows is the block mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer_policy import random_sequences
from trainer_testkit import make_group, tiny_llama

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError
from rollmill.sample_codec import encode_group
from rollmill.trainer import attention
from rollmill.trainer.layout import MicroBatch, TokenSequence, plan_packed, plan_padded, plan_trees
from rollmill.trainer.policy import Policy
from rollmill.trainer.worker import TorchTrainer

DEVICE = torch.device("cuda")
HEAD_DIM = 32
SHAPE = {"hidden_size": 4 * HEAD_DIM, "intermediate_size": 256}
TIMED = ("second", "mfu")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def scores_and_gradient(
    plan: list[MicroBatch], items: list[TokenSequence], *, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs in the order of `items`, and the gradient of half their squares' sum, flat."""
    model = tiny_llama(**SHAPE)
    policy = Policy(model, device=device, compute_dtype=dtype)
    found: dict[int, torch.Tensor] = {}
    for batch in plan:
        log_probs, _ = policy.log_probs(batch, temperature=0.7)
        (log_probs * log_probs.detach()).sum().backward()
        sizes = [len(items[member].targets) for member in batch.members]
        found |= dict(zip(batch.members, log_probs.detach().cpu().split(sizes), strict=True))
    gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
    return torch.cat([found[member] for member in sorted(found)]), gradient


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))


def test_the_kernel_for_packed_rows_gives_what_the_block_mask_gives(
    rng: np.random.Generator,
) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernel needs compute capability 8.0")
    assert attention.has_kernel(DEVICE, torch.bfloat16, head_dim=HEAD_DIM)
    assert not Policy(tiny_llama(**SHAPE), device=DEVICE, compute_dtype=torch.bfloat16).needs_mask
    items = random_sequences(rng)
    kernel, masked = (
        scores_and_gradient(
            plan_packed(items, 64, needs_mask=needs_mask),
            items,
            device=DEVICE,
            dtype=torch.bfloat16,
        )
        for needs_mask in (False, True)
    )
    torch.testing.assert_close(kernel[0], masked[0], rtol=0, atol=0.05)
    assert cosine(kernel[1], masked[1]) > 0.999


@pytest.mark.parametrize(
    "plan",
    [
        lambda items: plan_padded(items, 64),
        lambda items: plan_trees(items, 64),
        lambda items: plan_packed(items, 64),
        lambda items: plan_packed(items, 64, needs_mask=False),
    ],
    ids=["padded", "tree", "packed with a mask", "packed"],
)
def test_float32_on_the_gpu_is_float32_on_the_cpu(
    plan: Callable[[list[TokenSequence]], list[MicroBatch]], rng: np.random.Generator
) -> None:
    items = random_sequences(rng)
    ours, expected = (
        scores_and_gradient(plan(items), items, device=device, dtype=torch.float32)
        for device in (DEVICE, torch.device("cpu"))
    )
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(
    lora: dict[str, Any] | None, save_model: Callable[..., str], rng: np.random.Generator
) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    path = save_model(tiny_llama(**SHAPE))
    groups = [
        encode_group(make_group(i, [1.0, 0.0, 0.5], rng=rng, log_prob=-4.0)) for i in range(4)
    ]

    def steps(device: str) -> list[dict[str, float]]:
        config = TrainerConfig.model_validate(
            {"device": device, "lora": lora, "optimizer": {"lr": 1e-3, "eps": 1e-3}}
        )
        which = TorchTrainer(
            config=config.model_dump(mode="json"),
            model_path=path,
            seed=0,
            num_total_steps=3,
            context_length=64,
        )
        arguments: dict[str, Any] = {"reward_key": None, "max_new_tokens": 8, "temperature": 1.0}
        return [which.train(groups, step=step, **arguments) for step in range(3)]

    for ours, expected in zip(steps("cuda"), steps("cpu"), strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith("tokens/p") and not any(word in name for word in TIMED):
                assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_more_ranks_than_gpus_are_refused(save_model: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_ranks"):
        TorchTrainer(
            config=TrainerConfig(device="cuda").model_dump(mode="json"),
            model_path=save_model(tiny_llama()),
            seed=0,
            num_total_steps=1,
            context_length=64,
            rank=torch.cuda.device_count(),
            num_ranks=torch.cuda.device_count() + 1,
            rendezvous="tcp://127.0.0.1:1",
        )
