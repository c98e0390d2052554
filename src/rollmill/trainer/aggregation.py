"""How per-token losses become one number: a weight per token, known before the first forward pass.

The loss of an optimizer step is Σ_t weight_t · loss_t over its trainable tokens. Because the
weights hold the denominators of the *whole* step, the sum may be cut into micro-batches, packed
or spread over ranks in any way: adding up the parts gives the same loss and gradient.

Invariant: with loss_t = 1 everywhere and at least one trainable token per attempt, `per_rollout`
and `per_token` give 1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Aggregation = Literal["per_rollout", "per_token", "constant"]


def token_weights(
    attempts: npt.NDArray[np.int64],
    num_attempts: int,
    aggregation: Aggregation,
    *,
    constant_length: int | None = None,
) -> npt.NDArray[np.float64]:
    """float64 [T]: the weight of each trainable token of one optimizer step.

    - `per_rollout`: 1 / (A · tokens of its attempt): the mean over attempts of the mean over
      their tokens (GRPO, arXiv 2402.03300, eq. 3). Fan-out siblings share their attempt's mean.
    - `per_token`: 1 / T (DAPO, arXiv 2503.14476, eq. 8).
    - `constant`: 1 / (A · constant_length) (Dr. GRPO, arXiv 2503.20783, eq. 2).

    Args:
        attempts: int64 [T], which attempt (0..A-1) each trainable token belongs to.
        num_attempts: A, the attempts of the step, those without trainable tokens included.
        aggregation: which of the three.
        constant_length: the divisor of `constant`.
    """
    num_tokens = len(attempts)
    if num_tokens == 0:
        return np.zeros(0)
    if aggregation == "per_token":
        return np.full(num_tokens, 1 / num_tokens)
    if aggregation == "per_rollout":
        tokens_of_attempt = np.bincount(attempts, minlength=num_attempts)
        return 1 / (num_attempts * tokens_of_attempt[attempts])
    if constant_length is None:
        raise ValueError("constant aggregation needs constant_length")
    return np.full(num_tokens, 1 / (num_attempts * constant_length))
