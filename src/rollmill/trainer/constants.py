"""What the objective takes as given: per-token constants of a call, cut to each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import TrainerError
from rollmill.trainer.batch import TrainingBatch
from rollmill.trainer.losses import TokenBatch
from rollmill.trainer.streams import FlatFloats


@dataclass(frozen=True)
class TokenConstants:
    """Vectors [T] over the trainable tokens of a batch; None where the algorithm needs none.

    Attributes:
        batch: whose tokens.
        advantages: from the estimator.
        old_log_probs: under the policy at the start of the call; None takes the current ones,
            which are the same when the call is one optimizer step.
        reference_log_probs: under the reference model.
        teacher_log_probs: under the teacher.
    """

    batch: TrainingBatch
    advantages: FlatFloats
    old_log_probs: FlatFloats | None = None
    reference_log_probs: FlatFloats | None = None
    teacher_log_probs: FlatFloats | None = None

    def tokens(self, members: Sequence[int], log_probs: Tensor, entropies: Tensor) -> TokenBatch:
        """The tokens of samples `members`, with what the policy just said about them."""
        indices = self.batch.token_indices(members)

        def pick(flat: FlatFloats | None) -> Tensor | None:
            return None if flat is None else torch.from_numpy(flat[indices]).to(log_probs)

        old = pick(self.old_log_probs)
        starts = self.batch.starts
        sequences = np.repeat(np.arange(len(members)), [starts[s + 1] - starts[s] for s in members])
        return TokenBatch(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old is None else old,
            rollout_log_probs=torch.from_numpy(self.batch.rollout_log_probs[indices]).to(log_probs),
            advantages=torch.from_numpy(self.advantages[indices]).to(log_probs),
            sequences=torch.from_numpy(sequences).to(log_probs.device),
            num_sequences=len(members),
            entropies=entropies,
            reference_log_probs=pick(self.reference_log_probs),
            teacher_log_probs=pick(self.teacher_log_probs),
        )

    def idle_tokens(self, log_probs: Tensor, entropies: Tensor) -> TokenBatch:
        """Harmless tokens of the same make-up, for a forward pass without members."""
        same = log_probs.detach()
        return TokenBatch(
            log_probs=log_probs,
            old_log_probs=same,
            rollout_log_probs=same,
            advantages=torch.zeros_like(same),
            sequences=torch.zeros_like(same, dtype=torch.int64),
            num_sequences=1,
            entropies=entropies,
            reference_log_probs=None if self.reference_log_probs is None else same,
            teacher_log_probs=None if self.teacher_log_probs is None else same,
        )


def teacher_log_probs(batch: TrainingBatch) -> FlatFloats:
    """float32 [T], as the samples carry them.

    Raises:
        TrainerError: a sample has none, or not one per response token.
    """
    per_sample = []
    for sample in batch.samples:
        teacher = sample.teacher_log_probs
        if teacher is None or len(teacher) != sample.response_length:
            raise TrainerError(
                "on-policy distillation needs the teacher's log-probs of every response token",
                where=f"sample {sample.index}",
                expected=f"{sample.response_length} log-probs",
                found="none" if teacher is None else str(len(teacher)),
            )
        per_sample.append(teacher)
    return batch.flatten(per_sample)
