"""AdamW over float32 master weights, with weight decay where it belongs."""

from __future__ import annotations

import math

import torch
from torch import nn

from rollmill.config.trainer import OptimizerConfig
from rollmill.errors import TrainerError
from rollmill.trainer.ranks import whole


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms, biases) do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def apply_gradients(
    optimizer: torch.optim.Optimizer, *, learning_rate: float, grad_clip: float, step: int
) -> float:
    """One optimizer step on the gradients that are there; returns their norm before clipping.

    A parameter without a gradient is stepped with zeros, so that a step whose samples needed no
    forward pass is the step it would have been with one. Gradients are dropped afterwards.

    Raises:
        TrainerError: the norm is not finite. The weights are untouched.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, grad_clip)))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise not_finite("gradient norm", norm, step)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def not_finite(what: str, value: float, step: int) -> TrainerError:
    """The error for a loss or gradient norm that is NaN or infinite."""
    return TrainerError(
        f"the {what} is not finite",
        where=f"training step {step}",
        expected="a finite number",
        found=str(value),
        fix="lower trainer.optimizer.lr, or train in float32; the weights are as they were before",
    )
