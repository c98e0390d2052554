"""How answers are judged."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from rollmill.config.base import Section

_KEY_OF_TYPE = {"dapo": "score", "boxed_dapo": "score"}


class RewardConfig(Section):
    """The reward of a run or of one evaluation set."""

    model_config = ConfigDict(allow_inf_nan=False)

    type: str | None = None
    """Built-in reward: `math`, `deepscaler`, `dapo`, `f1`, `gpqa`, `ifbench`, `remote`, `code`,
    `random`, each also as `boxed_…`. A row's `metadata.reward_type` overrides it."""
    function: str | None = None
    """Your own reward instead: `module:function` or `file.py:function`."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weighted sum of several rewards (type or function path → weight); each part is logged, the
    sum is the part `total`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the built-in type (for example `url` for `remote`). With several types: one
    mapping per type, under the type's name."""
    per_group: bool = False
    """The function judges all answers to a prompt at once."""
    reward_key: str | None = None
    """Which part is the training signal when the reward is a mapping; null takes `score` for
    `dapo` and `total` for `weights`."""
    num_workers: int = Field(1, ge=1)
    """Worker processes that grade."""
    timeout_s: float = Field(5.0, gt=0)
    """Time limit of one answer; the worker is killed and replaced when it is passed."""
    worker_memory_mb: int = Field(2048, ge=64)
    """Address-space limit of one worker process, above what it needs to start."""
    invalid_reward: float | None = None
    """Number for an answer in which no result was found; null takes what the type gives a wrong
    answer (0; -1 for `dapo`)."""
    timeout_reward: float | None = None
    """Number for an answer whose grading passed the time limit; null as for `invalid_reward`."""
    error_reward: float | None = None
    """Number for an answer whose grading raised; null makes the sample FAILED instead."""

    @model_validator(mode="before")
    @classmethod
    def _default_key(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("reward_key") is not None:
            return values
        key = "total" if values.get("weights") else _KEY_OF_TYPE.get(str(values.get("type")))
        return {**values, "reward_key": key} if key else values

    @model_validator(mode="after")
    def _one_source(self) -> RewardConfig:
        sources = [self.type is not None, self.function is not None, bool(self.weights)]
        if sum(sources) > 1:
            raise ValueError("give at most one of `type`, `function` and `weights`")
        if self.per_group and self.function is None:
            raise ValueError("`per_group` judges with your own function: give `function` too")
        return self
