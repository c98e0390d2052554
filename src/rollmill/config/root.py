"""The whole configuration: one section per room, composed."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from rollmill.config.base import Section
from rollmill.config.data import DatasetConfig
from rollmill.config.engine import EngineConfig
from rollmill.config.evaluation import EvalConfig
from rollmill.config.faults import ENGINE_KINDS, FaultsConfig
from rollmill.config.model import ModelConfig
from rollmill.config.opd import OpdConfig, check_opd, replayed
from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import RolloutConfig
from rollmill.config.run import RunConfig, TelemetryConfig
from rollmill.config.sft import check_answers
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
    opd: OpdConfig = OpdConfig()
    """On-policy distillation from a teacher."""
    weights: WeightsConfig = WeightsConfig()
    """Moving new weights to the engines."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out prompts."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is recorded."""
    faults: FaultsConfig = FaultsConfig()
    """Faults made on purpose, to test that a run survives them."""

    @model_validator(mode="after")
    def _evaluation_has_engines(self) -> Config:
        if not self.eval.num_engines:
            return self
        num_engines = len(self.engine.urls) or self.engine.num_engines
        if self.eval.num_engines >= num_engines:
            raise ValueError(
                f"eval.num_engines: expected fewer than the {num_engines} of engine (one must be "
                f"left to train with), found {self.eval.num_engines}"
            )
        if self.engine.offload:
            raise ValueError(
                "eval.num_engines: does not go together with engine.offload (evaluation would use "
                "the memory that is freed for the trainer)"
            )
        return self

    @model_validator(mode="after")
    def _faults_can_be_made(self) -> Config:
        if self.faults.every and self.engine.urls:
            needs_process = sorted(set(self.faults.kinds) & set(ENGINE_KINDS))
            if needs_process:
                raise ValueError(
                    f"faults.kinds: {needs_process[0]} needs engines that the run starts itself, "
                    "found engine.urls"
                )
        return self

    @property
    def attempts_per_batch(self) -> int:
        """Answers in one batch of rollouts."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def needs_engines(self) -> bool:
        """Whether anything is generated: training answers or evaluations."""
        return not self.rollout.is_replay or bool(self.eval.datasets)

    @property
    def training_temperature(self) -> float:
        """What the trainer's log-probs are taken at: recorded answers were scored at 1."""
        return 1.0 if self.opd.mode == "offline" else self.rollout.sampling.temperature

    @model_validator(mode="before")
    @classmethod
    def _recorded_answers_are_replayed(cls, values: Any) -> Any:
        return replayed(values)

    @model_validator(mode="after")
    def _distillation_agrees(self) -> Config:
        check_opd(self.opd, self.rollout, self.trainer.algorithm)
        return self

    @model_validator(mode="after")
    def _answers_agree(self) -> Config:
        check_answers(self)
        return self

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
