"""The whole configuration: one section per room, composed."""

from __future__ import annotations

from pydantic import model_validator

from rollmill.config.base import Section
from rollmill.config.data import DatasetConfig
from rollmill.config.engine import EngineConfig
from rollmill.config.evaluation import EvalConfig
from rollmill.config.model import ModelConfig
from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import RunConfig, TelemetryConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.config.weights import WeightsConfig

GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the answers to one prompt with each other."""


class Config(Section):
    """Everything a run needs."""

    run: RunConfig = RunConfig()
    """Where the run lives and how long it is."""
    model: ModelConfig
    """The model that is trained."""
    data: DatasetConfig
    """Training prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Generating one batch of answers."""
    reward: RewardConfig = RewardConfig()
    """Judging them."""
    engine: EngineConfig = EngineConfig()
    """The inference engines."""
    trainer: TrainerConfig = TrainerConfig()
    """Learning from the batch."""
    weights: WeightsConfig = WeightsConfig()
    """Moving new weights to the engines."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out prompts."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is recorded."""

    @property
    def attempts_per_batch(self) -> int:
        """Answers in one batch of rollouts."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def needs_engines(self) -> bool:
        """Whether anything is generated: training answers or evaluations."""
        return not self.rollout.is_replay or bool(self.eval.datasets)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.rollout.asynchronous and self.engine.offload:
            raise ValueError(
                "engine.offload: does not go together with rollout.asynchronous (engines write "
                "while the trainer trains)"
            )
        if self.rollout.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature: expected more than 0 for training, found 0 "
                "(all answers to a prompt would be the same)"
            )
        n = self.rollout.n_samples_per_prompt
        if n == 1 and self.trainer.algorithm.advantage in GROUP_RELATIVE:
            raise ValueError(
                f"rollout.n_samples_per_prompt: {self.trainer.algorithm.advantage} compares the "
                "answers to one prompt, so expected 2 or more, found 1 (every advantage would be 0)"
            )
        step = self.trainer.global_batch_size
        if step is not None and self.attempts_per_batch % step:
            raise ValueError(
                f"trainer.global_batch_size: expected a divisor of rollout.batch_size × "
                f"n_samples_per_prompt = {self.attempts_per_batch}, found {step} "
                f"({self.attempts_per_batch % step} answers would be left over each step)"
            )
        return self
