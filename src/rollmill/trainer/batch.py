"""One batch of rollouts as flat arrays over its trainable tokens.

FAILED samples are left out here, of loss and statistics alike; an attempt whose samples all
failed is no attempt. Samples taken out of the loss (`in_loss`) and attempts without trainable
tokens stay in the statistics and in the denominators.

Invariants: siblings of an attempt are one attempt; every trainable token of every sample that did
not fail is in the arrays exactly once, in the order of groups, attempts, samples, tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.errors import TrainerError
from rollmill.sample import Group, Sample, Status
from rollmill.trainer.layout import TokenSequence

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingBatch:
    """What one call of the trainer works on: S samples, A attempts, T trainable tokens.

    Attributes:
        samples: those that did not fail.
        attempts: int64 [S], which attempt (0..A-1) each sample belongs to.
        groups: int64 [A], the group index of each attempt.
        slots: int64 [A], each attempt's place among all attempts of the batch, failed ones too.
        rewards: float64 [A]; NaN where there is none and none is needed.
        num_slots: attempts given, failed ones too.
        num_failed: samples left out.
    """

    samples: tuple[Sample, ...]
    attempts: Ints
    groups: Ints
    slots: Ints
    rewards: Floats
    num_slots: int
    num_failed: int

    @cached_property
    def masks(self) -> list[npt.NDArray[np.bool_]]:
        """Per sample, bool [R_s]: response tokens in the loss."""
        return [sample.loss_mask for sample in self.samples]

    @cached_property
    def starts(self) -> Ints:
        """int64 [S + 1]: where each sample's trainable tokens begin in the flat arrays."""
        return np.cumsum([0, *(int(mask.sum()) for mask in self.masks)])

    @cached_property
    def token_samples(self) -> Ints:
        """int64 [T]: the sample of each trainable token."""
        return np.repeat(np.arange(len(self.samples)), np.diff(self.starts))

    @property
    def num_tokens(self) -> int:
        """T, the trainable tokens."""
        return int(self.starts[-1])

    @cached_property
    def rollout_log_probs(self) -> npt.NDArray[np.float32]:
        """float32 [T]: as the engine reported them; 0 where unknown (`has_rollout_log_probs`)."""
        return self.flatten([sample.rollout_log_probs for sample in self.samples])

    @cached_property
    def has_rollout_log_probs(self) -> bool:
        """Whether every trainable token has one; recorded answers may come without."""
        return all(
            segment.log_probs is not None
            for sample in self.samples
            for segment in sample.segments
            if segment.trainable
        )

    def flatten(self, per_sample: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """float32 [T]: the entries on trainable tokens of one [R_s] vector per sample."""
        chosen = [values[mask] for values, mask in zip(per_sample, self.masks, strict=True)]
        return np.concatenate(chosen or [np.zeros(0)]).astype(np.float32)

    def unflatten(self, flat: npt.NDArray[Any]) -> list[Floats]:
        """The reverse of `flatten`: float64 [R_s] per sample, 0 under the mask."""
        full = []
        for number, mask in enumerate(self.masks):
            values = np.zeros(len(mask))
            values[mask] = flat[self.starts[number] : self.starts[number + 1]]
            full.append(values)
        return full

    def token_indices(self, samples: Sequence[int]) -> Ints:
        """int64: where the trainable tokens of `samples` are in the flat arrays, in that order."""
        parts = [np.arange(self.starts[s], self.starts[s + 1]) for s in samples]
        return np.concatenate(parts or [np.zeros(0, np.int64)])

    def sequence(self, sample_number: int) -> TokenSequence:
        """The sample as something to score: its trainable tokens are the targets."""
        sample = self.samples[sample_number]
        targets = len(sample.prompt_tokens) + np.flatnonzero(self.masks[sample_number])
        return TokenSequence(sample.tokens, targets, family=sample.group_index)

    def steps(self, global_batch_size: int | None) -> list[Ints]:
        """Attempts of each optimizer step, by their places in the batch; nothing is ever dropped.

        A step has `global_batch_size` places. A batch that does not divide (a checkpoint held
        groups from a time with another n_samples_per_prompt, say) makes steps of nearly the same
        size, none larger: each is a mean over its own attempts, whatever their number.
        """
        size = global_batch_size or max(self.num_slots, 1)
        num_steps = math.ceil(self.num_slots / size)
        step_of = self.slots * num_steps // max(self.num_slots, 1)
        return [np.flatnonzero(step_of == number) for number in range(num_steps)]


def build_batch(
    groups: Sequence[Group],
    *,
    reward_key: str | None,
    needs_reward: bool = True,
    vocab_size: int | None = None,
    context_length: int | None = None,
) -> TrainingBatch:
    """The batch of `groups`.

    Raises:
        TrainerError: a sample cannot be trained on (no reward, unfinished, ids outside the
            vocabulary, too long, log-probs that are not finite).
    """
    samples: list[Sample] = []
    attempts: list[int] = []
    attempt_groups: list[int] = []
    slots: list[int] = []
    rewards: list[float] = []
    slot = num_failed = 0
    for group in groups:
        for siblings in group.attempts():
            kept = [sample for sample in siblings if sample.status is not Status.FAILED]
            num_failed += len(siblings) - len(kept)
            if kept:
                for sample in kept:
                    _check(sample, vocab_size, context_length)
                attempts += [len(attempt_groups)] * len(kept)
                samples += kept
                attempt_groups.append(group.group_index)
                slots.append(slot)
                rewards.append(_reward(kept, reward_key, needs_reward))
            slot += 1
    return TrainingBatch(
        samples=tuple(samples),
        attempts=np.array(attempts, np.int64),
        groups=np.array(attempt_groups, np.int64),
        slots=np.array(slots, np.int64),
        rewards=np.array(rewards, np.float64),
        num_slots=slot,
        num_failed=num_failed,
    )


def _reward(siblings: Sequence[Sample], key: str | None, is_needed: bool) -> float:
    """The attempt's reward; siblings have the same one, or count with their mean."""
    if not is_needed and any(sample.reward is None for sample in siblings):
        return float("nan")
    try:
        values = [sample.scalar_reward(key) for sample in siblings]
    except ValueError as error:
        raise TrainerError(
            "a sample has no usable reward",
            where=f"sample {siblings[0].index}",
            expected="a number, or parts and a reward key that names one of them",
            found=str(error),
            fix="set reward.key to the part to train on",
        ) from error
    value = values[0] if len(set(values)) == 1 else float(np.mean(values))
    if not np.isfinite(value):
        raise _bad_sample(siblings[0], "a finite reward", str(value))
    return value


def _check(sample: Sample, vocab_size: int | None, context_length: int | None) -> None:
    if not sample.status.is_finished:
        raise _bad_sample(sample, "a finished sample", f"status {sample.status.value}")
    tokens = sample.tokens
    if context_length is not None and len(tokens) > context_length:
        raise _bad_sample(sample, f"at most {context_length} tokens", f"{len(tokens)}")
    if (
        vocab_size is not None
        and len(tokens)
        and not 0 <= tokens.min() <= tokens.max() < vocab_size
    ):
        found = f"ids from {tokens.min()} to {tokens.max()}"
        raise _bad_sample(sample, f"token ids below the vocabulary size {vocab_size}", found)
    mask = sample.loss_mask
    if not mask.any():
        return
    if len(sample.prompt_tokens) == 0:
        raise _bad_sample(sample, "a prompt of at least one token", "an empty prompt")
    log_probs = sample.rollout_log_probs[mask]
    if not np.isfinite(log_probs).all():
        raise _bad_sample(sample, "finite log-probs of trainable tokens", f"{log_probs.min()}")


def _bad_sample(sample: Sample, expected: str, found: str) -> TrainerError:
    return TrainerError(
        "a sample cannot be trained on",
        where=f"sample {sample.index} of group {sample.group_index}",
        expected=expected,
        found=found,
    )
