"""Evaluation on held-out prompts."""

from __future__ import annotations

from pydantic import Field, model_validator

from rollmill.config.base import Section
from rollmill.config.data import DatasetConfig
from rollmill.config.reward import RewardConfig
from rollmill.config.sampling import SamplingConfig


class EvalDatasetConfig(Section):
    """One evaluation set, with its own sampling, reward and limits."""

    name: str = Field(pattern=r"^[\w.-]+$")
    """Name in the metrics: `eval/NAME/…`."""
    data: DatasetConfig
    """The prompts."""
    n_samples_per_prompt: int = Field(1, ge=1)
    """Answers per prompt; pass@k is given for every power of two up to this."""
    sampling: SamplingConfig | None = None
    """How tokens are chosen; null takes the run's with temperature 0."""
    reward: RewardConfig | None = None
    """How answers are judged; null takes the run's."""
    generate: str | None = None
    """Your generate hook for this set; null takes the run's."""
    pass_threshold: float = 1.0
    """Reward from which an answer counts as right, for pass@k."""

    @model_validator(mode="after")
    def _answers_are_generated(self) -> EvalDatasetConfig:
        if self.data.sft is not None:
            raise ValueError(
                "data.sft: evaluation always generates answers, it never grades recorded ones: "
                "expected null"
            )
        return self


class EvalConfig(Section):
    """When and on what to evaluate."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 is never, except as below."""
    at_start: bool = True
    """Evaluate the starting weights."""
    at_end: bool = True
    """Evaluate the final weights."""
    max_concurrent_requests: int | None = Field(None, ge=1)
    """Requests of evaluation in flight; null takes the engine's limit."""
    num_engines: int = Field(0, ge=0)
    """Engines, the last ones of `engine`, set aside for evaluation: they hold the evaluated
    weights while training goes on with the others. 0: training waits for each evaluation, which
    uses its engines."""
    datasets: tuple[EvalDatasetConfig, ...] = ()
    """The sets; none means no evaluation."""

    @model_validator(mode="after")
    def _names_differ(self) -> EvalConfig:
        names = [dataset.name for dataset in self.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"datasets: two sets have the name {twice[0]!r}; their figures would mix"
            )
        return self
