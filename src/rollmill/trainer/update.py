"""The work on one batch of rollouts, phase by phase, over flat arrays of its trainable tokens.

The order is: (reference and old log-probs) → advantages → per optimizer step: weights of the
whole step, micro-batches with gradients added up, clip, AdamW. Everything is computed for the
whole step before its first micro-batch, so the result does not depend on how it is cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rollmill.errors import TrainerError
from rollmill.trainer.advantages import AdvantageInput, ppo
from rollmill.trainer.aggregation import StepTokens
from rollmill.trainer.batch import TrainingBatch
from rollmill.trainer.constants import TokenConstants, teacher_log_probs
from rollmill.trainer.critic import Critic, explained_variance
from rollmill.trainer.flops import step_operations
from rollmill.trainer.kl import kl_divergence
from rollmill.trainer.layout import MicroBatch, TokenSequence
from rollmill.trainer.metrics import (
    advantage_metrics,
    response_metrics,
    reward_metrics,
    token_metrics,
)
from rollmill.trainer.objective import objective
from rollmill.trainer.optimizer import apply_gradients, not_finite
from rollmill.trainer.policy import Policy
from rollmill.trainer.sample_reports import sample_reports
from rollmill.trainer.schedule import learning_rate
from rollmill.trainer.scoring import joint_plan, score_sequences
from rollmill.trainer.streams import FlatFloats, TokenStreams

if TYPE_CHECKING:
    from rollmill.trainer.learner import Learner


class BatchUpdate:
    """One call of the trainer: arrays over the T trainable tokens, filled phase by phase.

    Args:
        learner: whose policy is trained.
        batch: what it is trained on.
        step: the training call's number, from 0.
        temperature: what the answers were sampled at.
    """

    def __init__(
        self, learner: Learner, batch: TrainingBatch, *, step: int, temperature: float
    ) -> None:
        self.learner = learner
        self.batch = batch
        self.step = step
        self.temperature = temperature
        self.config = learner.config.algorithm
        self.steps = batch.steps(learner.config.global_batch_size)
        self.seconds: dict[str, float] = {}
        self.streams = TokenStreams(batch.num_tokens)
        self.old: FlatFloats | None = None
        self.reference: FlatFloats | None = None
        self.reward_kl: FlatFloats | None = None
        self.values: FlatFloats = np.zeros(0, np.float32)
        self.returns: FlatFloats = np.zeros(0, np.float32)

    def run(self, constant_length: int) -> dict[str, float]:
        """All phases; the metrics."""
        started = time.perf_counter()
        self._score_with_other_policies()
        with self._timed("advantages"):
            self.advantages = self._advantages()
        self._constants = TokenConstants(
            self.batch,
            advantages=self.advantages,
            old_log_probs=self.old,
            reference_log_probs=self.reference,
            teacher_log_probs=teacher_log_probs(self.batch) if self.learner.algorithm.opd else None,
        )
        reports = [
            self._optimizer_step(attempts, number, constant_length)
            for number, attempts in enumerate(self.steps)
        ]
        self.streams.gather(self.learner.ranks)
        if self.reward_kl is not None:
            self.streams.values["reference_kl"] = self.reward_kl
        elapsed = time.perf_counter() - started
        return (
            self._metrics(reports)
            | self._utilization(elapsed)
            | {
                "optimizer/steps": float(len(self.steps)),
                "tokens/per_second": self.batch.num_tokens / elapsed,
                "seconds/total": elapsed,
            }
        )

    def reports(self) -> list[dict[str, Any]]:
        """What the call measured of each sample; see `sample_reports`."""
        if self.old is None or self.config.old_log_probs == "rollout":
            log_probs, is_scored = self.streams["log_probs"], self.streams.is_scored
        else:
            log_probs, is_scored = self.old, np.ones(self.batch.num_tokens, np.bool_)
        return sample_reports(
            self.batch, log_probs=log_probs, is_scored=is_scored, advantages=self.advantages
        )

    def _utilization(self, elapsed: float) -> dict[str, float]:
        """`mfu`: operations of the learned samples over what the ranks could have done."""
        peak = self.learner.peak_operations
        if peak is None:
            return {}
        learned = [s for s in range(len(self.batch.samples)) if self._needs_gradient(s)]
        done = step_operations(self.learner.policy.model, self._sequences(learned))
        return {"mfu": done / (elapsed * peak * self.learner.ranks.size)}

    def _metrics(self, reports: Sequence[dict[str, float]]) -> dict[str, float]:
        streams = self.streams
        metrics = reward_metrics(self.batch) | response_metrics(self.batch)
        metrics |= advantage_metrics(self.advantages)
        metrics |= token_metrics(
            streams.values,
            streams.is_scored,
            self.batch.rollout_log_probs if self.batch.has_rollout_log_probs else None,
            is_old_rollout=self.config.old_log_probs == "rollout",
        )
        metrics |= _mean_of(reports)
        if self.learner.critic is not None and len(self.values):
            metrics["critic/value_mean"] = float(self.values.mean())
            metrics["critic/explained_variance"] = explained_variance(self.values, self.returns)
        metrics |= {f"seconds/{phase}": spent for phase, spent in self.seconds.items()}
        metrics["tokens/positions"] = float(streams.num_positions)
        if streams.num_positions:
            metrics["tokens/padding_share"] = streams.num_padding / streams.num_positions
        return metrics

    def _score_with_other_policies(self) -> None:
        """Old and reference log-probs, where the algorithm needs them before the first step."""
        self._check_rollout_log_probs()
        needs_old = len(self.steps) > 1 or self._has_reward_kl
        if self.config.old_log_probs == "rollout":
            self.old = self.batch.rollout_log_probs
        elif needs_old:
            with self._timed("old_log_probs"):
                self.old = self._score_all(self.learner.policy)
        if self.config.kl_coef:
            if self.learner.reference is None:
                raise TrainerError(
                    "the KL term needs a reference model", where="trainer.algorithm.kl_coef"
                )
            with self._timed("reference_log_probs"):
                self.reference = self._score_all(self.learner.reference)

    def _check_rollout_log_probs(self) -> None:
        """Recorded answers may come without log-probs; nothing may take 0 for them."""
        if self.batch.has_rollout_log_probs:
            return
        config, opd = self.config, self.learner.algorithm.opd
        needs = {
            "trainer.algorithm.old_log_probs: rollout": config.old_log_probs == "rollout",
            f"trainer.algorithm.importance_correction: {config.importance_correction}": (
                config.importance_correction != "none"
            ),
            f"trainer.algorithm.off_policy_mask_delta: {config.off_policy_mask_delta}": (
                config.off_policy_mask_delta is not None
            ),
            "opd.importance: truncate": opd is not None and opd.importance == "truncate",
        }
        for setting, is_needed in needs.items():
            if is_needed:
                raise TrainerError(
                    "the answers came without the log-probs they were sampled at",
                    where=setting.partition(":")[0],
                    expected="log-probs of every trainable token",
                    found=f"none for some, and {setting}",
                    fix="record them with the answers, or set old_log_probs: recompute, "
                    "importance_correction: none, off_policy_mask_delta: null and "
                    "opd.importance: none",
                )

    @property
    def _has_reward_kl(self) -> bool:
        return bool(self.config.kl_coef) and self.config.kl_placement == "reward"

    def _score_all(self, policy: Policy) -> FlatFloats:
        scores = score_sequences(
            policy,
            self._sequences(range(len(self.batch.samples))),
            budget=self._budget,
            temperature=self.temperature,
            ranks=self.learner.ranks,
        )
        return np.concatenate([np.zeros(0, np.float32), *scores])

    @property
    def _budget(self) -> int:
        return self.learner.config.max_tokens_per_micro_batch

    def _advantages(self) -> FlatFloats:
        penalties = None
        if self._has_reward_kl and self.old is not None and self.reference is not None:
            kl = kl_divergence(
                torch.from_numpy(self.old),
                torch.from_numpy(self.reference),
                self.config.kl_estimator,
            ).numpy()
            penalties = self.batch.unflatten(self.config.kl_coef * kl)
            self.reward_kl = kl
        values = None
        if self.learner.critic is not None:
            scores = self.learner.critic.values(self._sequences(range(len(self.batch.samples))))
            self.values = np.concatenate([np.zeros(0, np.float32), *scores])
            values = self.batch.unflatten(self.values)
        inputs = AdvantageInput(
            values=values,
            rewards=self.batch.rewards,
            groups=self.batch.groups,
            attempts=self.batch.attempts,
            masks=self.batch.masks,
            token_penalties=penalties,
        )
        if values is not None:
            gamma, lam = self.config.gamma, self.config.gae_lambda
            self.returns = self.batch.flatten(ppo(inputs, gamma=gamma, lam=lam)[1])
        return self.batch.flatten(self.learner.algorithm.advantages(inputs))

    def _sequences(self, samples: Iterable[int]) -> list[TokenSequence]:
        return [self.batch.sequence(sample) for sample in samples]

    def _optimizer_step(
        self, attempts: npt.NDArray[np.int64], number: int, constant_length: int
    ) -> dict[str, float]:
        learner = self.learner
        samples = np.flatnonzero(np.isin(self.batch.attempts, attempts))
        weights = self._weights(samples, attempts, constant_length)
        chosen = [s for s in samples.tolist() if self._needs_gradient(s)]
        with self._timed("forward_backward"):
            plan = joint_plan(
                learner.policy,
                self._sequences(chosen),
                self._budget,
                learner.ranks,
            )
            for micro_batch in plan:
                self._backward(micro_batch, chosen, weights)
        loss = self._loss_of_step(chosen, weights)
        rate = learning_rate(
            learner.config.optimizer,
            step=learner.num_optimizer_steps,
            num_total_steps=learner.num_optimizer_steps
            - number
            + len(self.steps) * max(learner.num_total_steps - self.step, 1),
        )
        with self._timed("optimizer"):
            norm = apply_gradients(
                learner.optimizer,
                learning_rate=rate,
                grad_clip=learner.config.optimizer.grad_clip,
                step=self.step,
            )
        learner.num_optimizer_steps += 1
        report = {"loss/total": loss, "optimizer/grad_norm": norm, "optimizer/lr": rate}
        if learner.critic is None:
            return report
        with self._timed("critic"):
            return report | self._critic_step(learner.critic, samples.tolist(), weights)

    def _critic_step(
        self, critic: Critic, samples: list[int], weights: npt.NDArray[np.float64]
    ) -> dict[str, float]:
        spans = [self.batch.token_indices([sample]) for sample in samples]
        return critic.learn(
            self._sequences(samples),
            [self.values[span] for span in spans],
            [self.returns[span] for span in spans],
            [weights[span] for span in spans],
            step=self.step,
        )

    def _weights(
        self,
        samples: npt.NDArray[np.int64],
        attempts: npt.NDArray[np.int64],
        constant_length: int,
    ) -> npt.NDArray[np.float64]:
        """float64 [T]: weights of this step's tokens, 0 for those of other steps."""
        indices = self.batch.token_indices(samples.tolist())
        token_samples = self.batch.token_samples[indices]
        weights = np.zeros(self.batch.num_tokens)
        weights[indices] = self.learner.algorithm.token_weights(
            StepTokens(
                attempts=np.searchsorted(attempts, self.batch.attempts[token_samples]),
                samples=token_samples,
                num_attempts=len(attempts),
                constant_length=constant_length,
            )
        )
        return weights

    def _needs_gradient(self, sample: int) -> bool:
        start, stop = self.batch.starts[sample], self.batch.starts[sample + 1]
        if start == stop:
            return False
        if not self.learner.algorithm.is_zero_without_advantage:
            return True
        return bool(np.any(self.advantages[start:stop]))

    def _backward(
        self, micro_batch: MicroBatch, chosen: Sequence[int], weights: npt.NDArray[np.float64]
    ) -> None:
        """Add the gradient of one micro-batch."""
        log_probs, entropies = self.learner.policy.log_probs(
            micro_batch, temperature=self.temperature
        )
        members = [chosen[member] for member in micro_batch.members]
        indices = self.batch.token_indices(members)
        if members:
            tokens = self._constants.tokens(members, log_probs, entropies)
            step_weights = torch.from_numpy(weights[indices]).to(log_probs)
        else:  # an idle forward pass: the same objective, of no weight
            tokens = self._constants.idle_tokens(log_probs, entropies)
            step_weights = torch.zeros_like(log_probs)
        algorithm = self.learner.algorithm
        result = objective(
            tokens, self.config, algorithm.loss, algorithm.opd, correction=algorithm.correction
        )
        torch.autograd.backward((result.losses * step_weights).sum())
        measured = {
            **result.streams,
            "log_probs": log_probs,
            "old_log_probs": tokens.old_log_probs,
            "entropy": entropies,
        }
        self.streams.declare(measured)
        if members:
            self.streams.record(micro_batch, measured, indices)

    def _loss_of_step(self, chosen: Sequence[int], weights: npt.NDArray[np.float64]) -> float:
        """The loss of the step over all ranks, summed in the order of the batch.

        Raises:
            TrainerError: it is not finite; gradients are dropped, on every rank alike.
        """
        indices = self.batch.token_indices(chosen)
        losses = self.learner.ranks.sum(self.streams["loss"][indices])
        loss = float(losses.astype(np.float64) @ weights[indices])
        if not math.isfinite(loss):
            self.learner.optimizer.zero_grad(set_to_none=True)
            raise not_finite("loss", loss, self.step)
        return loss

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def _mean_of(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each entry's mean over the optimizer steps of a call."""
    names: Any = reports[0] if reports else ()
    return {name: float(np.mean([report[name] for report in reports])) for name in names}
