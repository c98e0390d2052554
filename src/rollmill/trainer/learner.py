"""A policy, its optimizer and its algorithm: a batch of rollouts in, a better policy out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import TrainerError
from rollmill.sample import Group
from rollmill.trainer.algorithm import Algorithm
from rollmill.trainer.batch import build_batch
from rollmill.trainer.critic import Critic, ValueModel
from rollmill.trainer.optimizer import build_optimizer
from rollmill.trainer.policy import Policy
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.update import BatchUpdate


class Learner:
    """A policy, its optimizer and its algorithm.

    Args:
        policy: the model that is trained.
        config: the trainer section.
        algorithm: the estimator and loss that the section names.
        num_total_steps: training calls of the whole run, for the learning-rate schedule.
        reference: the reference model for the KL term; needed when its weight is not 0.
        context_length: most tokens of a sample.
        ranks: the processes that train together; the models are sharded over them.
        value_model: of the critic, for estimators that need one.
        peak_operations: what one rank's device can do per second, for the `mfu` metric.
    """

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        algorithm: Algorithm,
        *,
        num_total_steps: int,
        reference: Policy | None = None,
        context_length: int | None = None,
        ranks: Ranks | None = None,
        value_model: ValueModel | None = None,
        peak_operations: float | None = None,
    ) -> None:
        if algorithm.needs_critic and value_model is None:
            raise TrainerError(
                "the advantage estimator needs a critic",
                where="trainer.algorithm.advantage",
                expected="a value model",
                found="none",
            )
        self.ranks = ranks or Ranks()
        self.policy = policy
        self.config = config
        self.algorithm = algorithm
        self.reference = reference
        self.num_total_steps = num_total_steps
        self.peak_operations = peak_operations
        self.context_length = context_length
        if self.ranks.size > 1:
            for model in filter(None, (policy, reference, value_model)):
                model.shard(self.ranks.size)
        self.optimizer = build_optimizer(policy.model, config.optimizer)
        self.critic = None if value_model is None else Critic(value_model, config, self.ranks)
        self.num_optimizer_steps = 0
        self.sample_reports: list[dict[str, Any]] = []
        """Of the last call of `learn`; see `trainer.sample_reports`."""

    def learn(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        reward_key: str | None,
        max_new_tokens: int,
        temperature: float,
    ) -> dict[str, float]:
        """Train on `groups` once.

        Args:
            groups: one batch of rollouts.
            step: the training call's number, from 0, for the schedule and messages.
            reward_key: which reward part to train on, when rewards have parts.
            max_new_tokens: the divisor of `constant` aggregation by default.
            temperature: what the answers were sampled at.

        Raises:
            TrainerError: a sample cannot be used, or loss or gradient is not finite.
        """
        if temperature <= 0:
            raise TrainerError(
                "greedy answers have no policy gradient",
                where="rollout.sampling.temperature",
                expected="more than 0",
                found=str(temperature),
            )
        batch = build_batch(
            groups,
            reward_key=reward_key,
            needs_reward=self.algorithm.needs_reward,
            vocab_size=self.policy.vocab_size,
            context_length=self.context_length,
        )
        update = BatchUpdate(self, batch, step=step, temperature=temperature)
        metrics = update.run(self.config.algorithm.constant_length or max_new_tokens)
        self.sample_reports = update.reports()
        return metrics
