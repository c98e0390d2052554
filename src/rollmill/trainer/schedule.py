"""The learning rate as a pure function of the optimizer step: nothing to save or restore."""

from __future__ import annotations

import math

from rollmill.config.trainer import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, step: int, num_total_steps: int) -> float:
    """The learning rate of optimizer step `step`.

    Warm-up is linear, so that step `warmup_steps - 1` is the first at the peak; the decay then
    runs from the peak to `min_lr_ratio` times the peak at the last step.

    Args:
        config: the optimizer section.
        step: optimizer steps done before this one, from 0.
        num_total_steps: optimizer steps of the whole run.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = max(config.warmup_steps - 1, 0)
    share = min((step - first) / max(num_total_steps - 1 - first, 1), 1.0)
    height = 1 - share if config.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)
