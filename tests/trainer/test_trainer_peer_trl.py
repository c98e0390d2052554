"""Our losses against TRL's on the same log-probs and advantages: `make test-peers`.

Skipped where TRL is not installed. TRL's own `_compute_loss` runs, on a real GRPOTrainer; only its
forward pass is replaced by given log-probs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", reason="TRL is not installed: make test-peers")

from trainer_testkit import tiny_llama  # noqa: E402

from rollmill.config.trainer import AlgorithmConfig  # noqa: E402
from rollmill.trainer.advantages import grpo  # noqa: E402
from rollmill.trainer.aggregation import REDUCERS, StepTokens  # noqa: E402
from rollmill.trainer.losses import LOSSES, TokenBatch  # noqa: E402
from rollmill.trainer.objective import objective  # noqa: E402
from support.tiny import make_tokenizer  # noqa: E402

ROWS, WIDTH = 8, 12
LOW, HIGH = 0.2, 0.28

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {}),
    "dapo": ({"loss_type": "dapo"}, {"aggregation": "per_token"}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": 20},
        {"aggregation": "constant", "constant_length": 20},
    ),
    # TRL bounds the ratio from above only, at epsilon_high itself.
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1 + HIGH},
        {"loss": "cispo", "aggregation": "per_token", "clip_low": 1.0},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss": "gspo"},
    ),
    "kl": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"kl_coef": 0.3},
    ),
    "kl_unbiased": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
        {"kl_coef": 0.3, "kl_estimator": "unbiased"},
    ),
    "off_policy_mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
        {"off_policy_mask_delta": 0.1},
    ),
}


def batch() -> dict[str, Tensor]:
    """Log-probs far enough apart that every kind of clip happens; lengths from 1 to the whole."""
    rng = np.random.default_rng(3)
    log_probs = torch.from_numpy(-rng.random((ROWS, WIDTH)) * 3)
    lengths = np.array([1, WIDTH, 3, 7, 5, 2, 9, 4])
    return {
        "log_probs": log_probs,
        "old": log_probs + torch.from_numpy(rng.normal(0, 0.4, (ROWS, WIDTH))),
        "reference": log_probs + torch.from_numpy(rng.normal(0, 0.4, (ROWS, WIDTH))),
        "mask": torch.from_numpy(np.arange(WIDTH) < lengths[:, None]).long(),
        "advantages": torch.from_numpy(rng.normal(size=ROWS)),
    }


def trl_trainer(folder: Path, changes: dict[str, Any]) -> Any:
    from datasets import Dataset

    changes = dict(changes)
    beta = changes.pop("beta", 0.0)  # set afterwards: it would load a reference model from a folder
    settings = {
        "output_dir": str(folder),
        "epsilon": LOW,
        "epsilon_high": HIGH,
        "beta": 0.0,
        "num_generations": ROWS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        **changes,
    }
    trainer = trl.GRPOTrainer(
        model=tiny_llama(),
        processing_class=make_tokenizer(),
        args=trl.GRPOConfig(**settings),
        reward_funcs=[lambda completions, **rest: [0.0] * len(completions)],
        train_dataset=Dataset.from_dict({"prompt": ["1>"]}),
    )
    trainer.beta = beta
    return trainer


def trl_loss(trainer: Any, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """TRL's loss and its gradient with respect to the log-probs [ROWS, WIDTH]."""
    log_probs = values["log_probs"].clone().requires_grad_()
    entropies = torch.zeros_like(log_probs)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kw: (log_probs, entropies, None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.ones(ROWS, WIDTH, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :2],
            "prompt_mask": ids[:, :2],
            "completion_ids": ids,
            "completion_mask": values["mask"],
            "advantages": values["advantages"],
            "old_per_token_logps": values["old"],
            "ref_per_token_logps": values["reference"],
            "num_items_in_batch": values["mask"].sum(),
        },
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient


def our_loss(changes: dict[str, Any], values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    config = AlgorithmConfig(**{"clip_low": LOW, "clip_high": HIGH, **changes})
    log_probs = values["log_probs"].clone().requires_grad_()
    rows, columns = values["mask"].nonzero(as_tuple=True)
    tokens = TokenBatch(
        log_probs=log_probs[rows, columns],
        old_log_probs=values["old"][rows, columns],
        rollout_log_probs=values["old"][rows, columns],
        advantages=values["advantages"][rows],
        sequences=rows,
        num_sequences=ROWS,
        reference_log_probs=values["reference"][rows, columns] if config.kl_coef else None,
    )
    step = StepTokens(rows.numpy(), rows.numpy(), ROWS, config.constant_length or 1)
    weights = REDUCERS[config.aggregation](step, config)
    losses = objective(tokens, config, LOSSES[config.loss]).losses
    loss = (losses * torch.from_numpy(weights)).sum()
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str, tmp_path: Path) -> None:
    theirs, ours = CASES[name]
    values = batch()
    expected, expected_gradient = trl_loss(trl_trainer(tmp_path, theirs), values)
    loss, gradient = our_loss(ours, values)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)
    assert expected_gradient.abs().max() > 1e-3


def test_advantages_are_those_of_trl_but_for_its_larger_epsilon() -> None:
    rewards = np.array([0.0, 1.0, 0.25, 0.5])
    # GRPOTrainer: (r - mean) / (std + 1e-4), unbiased std.
    tensor = torch.from_numpy(rewards)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-4)
    np.testing.assert_allclose(grpo(rewards, np.zeros(4, np.int64)), expected, atol=5e-4)
