"""What a training step reports: one flat mapping of numbers, computed from the whole step at once.

Per-token values are gathered for the whole step before anything is averaged, so no metric depends
on how the step was cut into micro-batches. Means over tokens are over *scored* trainable tokens:
samples that need no forward pass (all advantages 0, no other term) are counted in
`tokens/skipped` instead. A metric that was not measured is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.sample import Sample, Status
from rollmill.trainer.batch import TrainingBatch

Values = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

STREAM_NAMES: Mapping[str, str] = {
    "clipped": "policy/clip_fraction",
    "entropy": "policy/entropy",
    "reference_kl": "policy/reference_kl",
    "teacher_kl": "policy/teacher_kl",
    "teacher_clipped": "policy/teacher_clip_fraction",
    "off_policy_masked": "policy/off_policy_masked_fraction",
    "nll": "sft/nll",
}
"""Per-token streams that are reported as their mean, by the name of the metric."""

UNREPORTED = frozenset(
    {
        "loss",
        "policy_loss",
        "log_probs",
        "old_log_probs",
        "ratio",
        "importance_weight",
        "opd_weight",
    }
)
"""Streams that other metrics are made of. What else a loss measures is `policy/NAME`."""


def reward_metrics(batch: TrainingBatch) -> dict[str, float]:
    """`reward/*` over attempts, `groups/*` over prompts."""
    metrics: dict[str, float] = {}
    known = batch.rewards[np.isfinite(batch.rewards)]
    if len(known):
        metrics |= {
            "reward/mean": float(known.mean()),
            "reward/std": float(known.std()),
            "reward/min": float(known.min()),
            "reward/max": float(known.max()),
        }
        metrics["groups/zero_spread_share"] = _zero_spread_share(batch)
    metrics |= _reward_parts(batch.samples)
    metrics["groups/count"] = float(len(np.unique(batch.groups)))
    return metrics


def response_metrics(batch: TrainingBatch) -> dict[str, float]:
    """`response/*` over samples that did not fail, and how many did."""
    metrics = {
        "samples/count": float(len(batch.samples)),
        "samples/failed": float(batch.num_failed),
    }
    if batch.samples:
        lengths = np.array([sample.response_length for sample in batch.samples])
        truncated = [sample.status is Status.TRUNCATED for sample in batch.samples]
        metrics |= {
            "response/length_mean": float(lengths.mean()),
            "response/length_min": float(lengths.min()),
            "response/length_max": float(lengths.max()),
            "response/truncated_share": float(np.mean(truncated)),
        }
    return metrics


def advantage_metrics(advantages: Values) -> dict[str, float]:
    """`advantage/*` over all trainable tokens."""
    if len(advantages) == 0:
        return {}
    wide = advantages.astype(np.float64)
    return {
        "advantage/mean": float(wide.mean()),
        "advantage/std": float(wide.std()),
        "advantage/max_abs": float(np.abs(wide).max()),
    }


def token_metrics(
    streams: Mapping[str, Values],
    is_scored: Bools,
    rollout_log_probs: Values | None,
    *,
    is_old_rollout: bool = False,
) -> dict[str, float]:
    """Means, extremes and effective sample size over the scored trainable tokens.

    Args:
        streams: per-token values [T] of the objective, valid where `is_scored`.
        is_scored: bool [T].
        rollout_log_probs: [T], as the engine reported them; None when they are not known.
        is_old_rollout: whether those are the old log-probs too: then the trainer's own are those
            that each token's optimizer step began with.
    """
    metrics = {
        "tokens/trained": float(is_scored.sum()),
        "tokens/skipped": float((~is_scored).sum()),
    }
    if not is_scored.any():
        return metrics
    scored = {name: values[is_scored].astype(np.float64) for name, values in streams.items()}
    for stream, values in scored.items():
        if stream not in UNREPORTED:
            name = STREAM_NAMES.get(stream, f"policy/{stream}")
            metrics[name] = float(values.mean())
    old = scored["old_log_probs"]
    metrics |= _ratio_metrics(scored, old)
    if "nll" in scored:
        metrics["sft/perplexity"] = float(np.exp(scored["nll"].mean()))
    if rollout_log_probs is not None:
        if "opd_weight" in scored:
            metrics |= _distillation_metrics(scored["opd_weight"])
        own = scored["log_probs"] if is_old_rollout else old
        gaps = own - rollout_log_probs[is_scored].astype(np.float64)
        weights = np.exp(gaps) if is_old_rollout else scored["importance_weight"]
        metrics |= _mismatch_metrics(gaps, weights)
    return metrics


def _ratio_metrics(scored: Mapping[str, Values], old: Values) -> dict[str, float]:
    metrics = {}
    if "ratio" in scored:
        metrics["policy/ratio_mean"] = float(scored["ratio"].mean())
        metrics["policy/ratio_max"] = float(scored["ratio"].max())
    drift = scored["log_probs"] - old
    metrics["policy/old_kl"] = float((np.exp(drift) - 1 - drift).mean())
    return metrics


def _distillation_metrics(weights: Values) -> dict[str, float]:
    """w = π / π_sampled over all scored tokens of the step: mean, spread, effective share."""
    return {
        "opd/importance_mean": float(weights.mean()),
        "opd/importance_std": float(weights.std()),
        "opd/importance_ess": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }


def _mismatch_metrics(gaps: Values, weights: Values) -> dict[str, float]:
    """How far the trainer's log-probs (before the step) are from the engine's."""
    return {
        "mismatch/log_prob_diff_mean": float(np.abs(gaps).mean()),
        "mismatch/log_prob_diff_max": float(np.abs(gaps).max()),
        "mismatch/weight_mean": float(weights.mean()),
        "mismatch/weight_max": float(weights.max()),
        "mismatch/ess": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }


def _zero_spread_share(batch: TrainingBatch) -> float:
    spreads = [np.ptp(batch.rewards[batch.groups == group]) for group in np.unique(batch.groups)]
    return float(np.mean([spread == 0 for spread in spreads]))


def _reward_parts(samples: Sequence[Sample]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for sample in samples:
        if isinstance(sample.reward, Mapping):
            for name, value in sample.reward.items():
                parts.setdefault(name, []).append(float(value))
    return {f"reward/part/{name}": float(np.mean(values)) for name, values in parts.items()}
