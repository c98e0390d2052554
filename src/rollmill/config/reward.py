"""How answers are judged."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rollmill.config.base import Section


class RewardConfig(Section):
    """The reward of a run or of one evaluation set."""

    type: str | None = None
    """Built-in reward: `math`, `deepscaler`, `dapo`, `f1`, `gpqa`, `ifbench`, `remote`, `code`,
    `random`, each also as `boxed_…`. A row's `metadata.reward_type` overrides it."""
    function: str | None = None
    """Your own reward instead: `module:function` or `file.py:function`."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weighted sum of several rewards (type or function path → weight); each part is logged."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the built-in type (for example `url` for `remote`)."""
    per_group: bool = False
    """The function judges all answers to a prompt at once."""
    reward_key: str | None = None
    """Which part is the training signal when the reward is a mapping."""
    num_workers: int = Field(1, ge=1)
    """Worker processes that grade."""
    timeout_s: float = Field(5.0, gt=0)
    """Time limit of one answer; the worker is killed and replaced when it is passed."""
    worker_memory_mb: int = Field(2048, ge=64)
    """Address-space limit of one worker process, above what it needs to start."""
    invalid_reward: float = 0.0
    """Number for an answer in which no result was found."""
    timeout_reward: float = 0.0
    """Number for an answer whose grading passed the time limit."""
    error_reward: float | None = None
    """Number for an answer whose grading raised; null makes the sample FAILED instead."""
