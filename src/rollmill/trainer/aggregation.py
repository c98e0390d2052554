"""How per-token losses become one number: a weight per token, known before the first forward pass.

The loss of an optimizer step is Σ_t weight_t · loss_t over its trainable tokens. Because the
weights hold the denominators of the *whole* step, the sum may be cut into micro-batches, packed
or spread over ranks in any way: adding up the parts gives the same loss and gradient.

Invariant: with loss_t = 1 everywhere and at least one trainable token per attempt, `per_rollout`
and `per_token` give 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.config.trainer import AlgorithmConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepTokens:
    """The T trainable tokens of one optimizer step, on all ranks together.

    Attributes:
        attempts: int64 [T], which attempt (0..A-1) each token belongs to.
        samples: int64 [T], which sample of the batch; siblings of one attempt differ in it.
        num_attempts: A, the attempts of the step, those without trainable tokens included; 0 when
            all of them failed, and then there are no tokens.
        constant_length: the divisor of `constant`.
    """

    attempts: Ints
    samples: Ints
    num_attempts: int
    constant_length: int


Reducer = Callable[[StepTokens, AlgorithmConfig], npt.NDArray[Any]]
"""Returns the weight of each token, [T]."""


def per_rollout(step: StepTokens) -> Floats:
    """1 / (A · tokens of its attempt): the mean over attempts of the mean over their tokens.

    GRPO, arXiv 2402.03300, eq. 3. Siblings of a fan-out share their attempt's mean.
    """
    tokens_of_attempt = np.bincount(step.attempts, minlength=step.num_attempts)
    return 1 / (step.num_attempts * tokens_of_attempt[step.attempts])


def per_token(step: StepTokens) -> Floats:
    """1 / T: the mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8)."""
    return np.full(len(step.attempts), 1 / max(len(step.attempts), 1))


def constant(step: StepTokens) -> Floats:
    """1 / (A · constant_length) (Dr. GRPO, arXiv 2503.20783, eq. 2)."""
    divisor = max(step.num_attempts, 1) * step.constant_length
    return np.full(len(step.attempts), 1 / divisor)


REDUCERS: Mapping[str, Reducer] = MappingProxyType(
    {
        "per_rollout": lambda step, _: per_rollout(step),
        "per_token": lambda step, _: per_token(step),
        "constant": lambda step, _: constant(step),
    }
)
"""Aggregations by their name in the configuration."""
