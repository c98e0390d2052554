"""The work on one batch of rollouts, phase by phase, over flat arrays of its trainable tokens.

The order is: (reference and old log-probs) → advantages → per optimizer step: weights of the
whole step, micro-batches with gradients added up, clip, AdamW. Everything is computed for the
whole step before its first micro-batch, so the result does not depend on how it is cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rollmill.errors import TrainerError
from rollmill.trainer.advantages import AdvantageInput
from rollmill.trainer.aggregation import token_weights
from rollmill.trainer.batch import TrainingBatch
from rollmill.trainer.kl import kl_divergence
from rollmill.trainer.layout import MicroBatch
from rollmill.trainer.losses import TokenBatch
from rollmill.trainer.metrics import (
    advantage_metrics,
    response_metrics,
    reward_metrics,
    token_metrics,
)
from rollmill.trainer.objective import objective
from rollmill.trainer.optimizer import apply_gradients, not_finite
from rollmill.trainer.policy import Policy
from rollmill.trainer.schedule import learning_rate
from rollmill.trainer.scoring import joint_plan, score_sequences

if TYPE_CHECKING:
    from rollmill.trainer.learner import Learner

FlatFloats = npt.NDArray[np.float32]


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
        self.streams: dict[str, FlatFloats] = {}
        self.is_scored = np.zeros(batch.num_tokens, np.bool_)
        self.old: FlatFloats | None = None
        self.reference: FlatFloats | None = None
        self.reward_kl: FlatFloats | None = None
        self.num_positions = self.num_padding = 0

    def run(self, constant_length: int) -> dict[str, float]:
        """All phases; the metrics."""
        started = time.perf_counter()
        self._score_with_other_policies()
        with self._timed("advantages"):
            self.advantages = self._advantages()
        self.teacher = self._teacher_log_probs() if self.config.opd_coef else None
        reports = [
            self._optimizer_step(attempts, number, constant_length)
            for number, attempts in enumerate(self.steps)
        ]
        self._gather()
        if self.reward_kl is not None:
            self.streams["reference_kl"] = self.reward_kl
        elapsed = time.perf_counter() - started
        metrics = reward_metrics(self.batch) | response_metrics(self.batch)
        metrics |= advantage_metrics(self.advantages)
        metrics |= token_metrics(self.streams, self.is_scored, self.batch.rollout_log_probs)
        metrics |= _mean_of(reports)
        metrics |= {f"seconds/{phase}": spent for phase, spent in self.seconds.items()}
        if self.num_positions:
            metrics["tokens/padding_share"] = self.num_padding / self.num_positions
        return metrics | {
            "optimizer/steps": float(len(self.steps)),
            "tokens/positions": float(self.num_positions),
            "tokens/per_second": self.batch.num_tokens / elapsed,
            "seconds/total": elapsed,
        }

    def _score_with_other_policies(self) -> None:
        """Old and reference log-probs, where the algorithm needs them before the first step."""
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

    @property
    def _has_reward_kl(self) -> bool:
        return bool(self.config.kl_coef) and self.config.kl_placement == "reward"

    def _score_all(self, policy: Policy) -> FlatFloats:
        scores = score_sequences(
            policy,
            [self.batch.sequence(number) for number in range(len(self.batch.samples))],
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
        inputs = AdvantageInput(
            rewards=self.batch.rewards,
            groups=self.batch.groups,
            attempts=self.batch.attempts,
            masks=self.batch.masks,
            token_penalties=penalties,
        )
        return self.batch.flatten(self.learner.algorithm.advantages(inputs))

    def _teacher_log_probs(self) -> FlatFloats:
        per_sample = []
        for sample in self.batch.samples:
            teacher = sample.teacher_log_probs
            if teacher is None or len(teacher) != sample.response_length:
                raise TrainerError(
                    "on-policy distillation needs the teacher's log-probs of every response token",
                    where=f"sample {sample.index}",
                    expected=f"{sample.response_length} log-probs",
                    found="none" if teacher is None else str(len(teacher)),
                )
            per_sample.append(teacher)
        return self.batch.flatten(per_sample)

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
                [self.batch.sequence(sample) for sample in chosen],
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
        return {"loss/total": loss, "optimizer/grad_norm": norm, "optimizer/lr": rate}

    def _weights(
        self,
        samples: npt.NDArray[np.int64],
        attempts: npt.NDArray[np.int64],
        constant_length: int,
    ) -> npt.NDArray[np.float64]:
        """float64 [T]: weights of this step's tokens, 0 for those of other steps."""
        indices = self.batch.token_indices(samples.tolist())
        token_attempts = self.batch.attempts[self.batch.token_samples[indices]]
        weights = np.zeros(self.batch.num_tokens)
        weights[indices] = token_weights(
            np.searchsorted(attempts, token_attempts),
            len(attempts),
            self.config.aggregation,
            constant_length=constant_length,
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
            tokens = self._token_batch(members, indices, log_probs, entropies)
            step_weights = self._tensor(weights, indices).to(log_probs.dtype)
        else:  # an idle forward pass: the same objective, of no weight
            tokens = self._idle_tokens(log_probs, entropies)
            step_weights = torch.zeros_like(log_probs)
        result = objective(tokens, self.config, self.learner.algorithm.loss)
        torch.autograd.backward((result.losses * step_weights).sum())
        if not members:
            for name in (*result.streams, "log_probs", "old_log_probs", "entropy"):
                self._stream(name)
            return
        self.num_positions += micro_batch.num_positions
        self.num_padding += micro_batch.num_positions - micro_batch.num_tokens
        measured = {"log_probs": log_probs, "old_log_probs": tokens.old_log_probs}
        self._record({**result.streams, **measured, "entropy": entropies}, indices)

    def _loss_of_step(self, chosen: Sequence[int], weights: npt.NDArray[np.float64]) -> float:
        """The loss of the step over all ranks, summed in the order of the batch.

        Raises:
            TrainerError: it is not finite; gradients are dropped, on every rank alike.
        """
        indices = self.batch.token_indices(chosen)
        losses = self.learner.ranks.sum(self._stream("loss")[indices])
        loss = float(losses.astype(np.float64) @ weights[indices])
        if not math.isfinite(loss):
            self.learner.optimizer.zero_grad(set_to_none=True)
            raise not_finite("loss", loss, self.step)
        return loss

    def _token_batch(
        self,
        members: Sequence[int],
        indices: npt.NDArray[np.int64],
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
    ) -> TokenBatch:
        def pick(flat: FlatFloats | None) -> torch.Tensor | None:
            return None if flat is None else self._tensor(flat, indices).to(log_probs.dtype)

        old = pick(self.old)
        counts = [self.batch.starts[s + 1] - self.batch.starts[s] for s in members]
        sequences = np.repeat(np.arange(len(members)), counts)
        return TokenBatch(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old is None else old,
            rollout_log_probs=self._tensor(self.batch.rollout_log_probs, indices),
            advantages=self._tensor(self.advantages, indices).to(log_probs.dtype),
            sequences=torch.from_numpy(sequences).to(log_probs.device),
            num_sequences=len(members),
            entropies=entropies,
            reference_log_probs=pick(self.reference),
            teacher_log_probs=pick(self.teacher),
        )

    def _idle_tokens(self, log_probs: torch.Tensor, entropies: torch.Tensor) -> TokenBatch:
        constants = log_probs.detach()
        return TokenBatch(
            log_probs=log_probs,
            old_log_probs=constants,
            rollout_log_probs=constants,
            advantages=torch.zeros_like(constants),
            sequences=torch.zeros_like(constants, dtype=torch.int64),
            num_sequences=1,
            entropies=entropies,
            reference_log_probs=None if self.reference is None else constants,
            teacher_log_probs=None if self.teacher is None else constants,
        )

    def _tensor(self, flat: npt.NDArray[Any], indices: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(flat[indices]).to(self.learner.policy.device)

    def _record(self, streams: dict[str, torch.Tensor], indices: npt.NDArray[np.int64]) -> None:
        self.is_scored[indices] = True
        for name, values in streams.items():
            self._stream(name)[indices] = values.detach().float().cpu().numpy()

    def _stream(self, name: str) -> FlatFloats:
        """float32 [T], zeros at first."""
        return self.streams.setdefault(name, np.zeros(self.batch.num_tokens, np.float32))

    def _gather(self) -> None:
        """Make per-token values and counts those of all ranks together."""
        ranks = self.learner.ranks
        if ranks.size == 1:
            return
        for name in sorted(self.streams):
            self.streams[name] = ranks.sum(self.streams[name])
        self.is_scored = ranks.sum(self.is_scored.astype(np.int64)) > 0
        counts = ranks.sum(np.array([self.num_positions, self.num_padding]))
        self.num_positions, self.num_padding = (int(count) for count in counts)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def _mean_of(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each entry's mean over the optimizer steps of a call."""
    names: Any = reports[0] if reports else ()
    return {name: float(np.mean([report[name] for report in reports])) for name in names}
