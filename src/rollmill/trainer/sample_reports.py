"""What one training call measured of each sample, for the record: plain values that fit msgpack."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.trainer.batch import TrainingBatch


def sample_reports(
    batch: TrainingBatch,
    *,
    log_probs: npt.NDArray[np.float32],
    is_scored: npt.NDArray[np.bool_],
    advantages: npt.NDArray[np.float32],
) -> list[dict[str, Any]]:
    """One mapping per sample that did not fail.

    Args:
        batch: what was trained on, with T trainable tokens.
        log_probs: float32 [T], the trainer's, before the optimizer step that the token was in.
        is_scored: bool [T], where `log_probs` holds something.
        advantages: float32 [T].

    Returns:
        Per sample `index`, `advantage` (mean over its trainable tokens, 0 without any) and
        `trainer_log_probs` (raw float32, one entry per response token, not a number where the
        trainer did not score it).
    """
    known = np.where(is_scored, log_probs, np.float32(np.nan))
    reports = []
    for number, (sample, mask) in enumerate(zip(batch.samples, batch.masks, strict=True)):
        span = slice(batch.starts[number], batch.starts[number + 1])
        full = np.full(len(mask), np.nan, np.float32)
        full[mask] = known[span]
        reports.append(
            {
                "index": sample.index,
                "advantage": float(advantages[span].mean()) if mask.any() else 0.0,
                "trainer_log_probs": full.tobytes(),
            }
        )
    return reports
