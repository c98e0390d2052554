"""Figures of one batch of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rollmill.filters.dynamic import MIN_STD
from rollmill.sample import Group, Sample, Status, attempt_rewards, flatten


def batch_metrics(
    groups: Sequence[Group], version: int, reward_key: str | None
) -> dict[str, float]:
    """Rewards (where judged), lengths, truncation, staleness and outcomes of a batch's groups.

    Each attempt counts once in the rewards; lengths are those of training samples.

    Args:
        groups: the batch.
        version: the weight version the engines serve; staleness is counted from it.
        reward_key: which part is the reward when rewards are mappings.
    """
    samples = flatten(groups)
    live = [Group(g.group_index, [s for s in g.samples if _is_judged(s)]) for g in groups]
    rewards = [attempt_rewards(group, reward_key) for group in live if group.samples]
    flat = np.asarray([r for group in rewards for r in group], np.float64)
    lengths = np.asarray([s.response_length for s in samples], np.float64)
    metrics = {
        "rollout/response_length_mean": _mean(lengths),
        "rollout/response_length_max": float(lengths.max(initial=0.0)),
        "rollout/truncated": _share(s.status is Status.TRUNCATED for s in samples),
        "rollout/failed_samples": float(sum(s.status is Status.FAILED for s in samples)),
        "rollout/response_tokens": float(lengths.sum()),
        "rollout/num_groups": float(len(groups)),
        "rollout/num_samples": float(len(samples)),
    }
    if flat.size or not samples:  # answers that nobody judges have no rewards, not rewards of 0
        metrics |= {
            "reward/mean": _mean(flat),
            "reward/std": float(flat.std()) if flat.size else 0.0,
            "reward/max": float(flat.max(initial=-np.inf)) if flat.size else 0.0,
            "rollout/zero_std_groups": _share(float(np.std(r)) <= MIN_STD for r in rewards),
        }
    return metrics | _staleness(samples, version) | _parts(samples) | _outcomes(samples)


def _is_judged(sample: Sample) -> bool:
    return sample.status is not Status.FAILED and sample.reward is not None


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    ages = [version - oldest for s in samples if (oldest := s.oldest_version) is not None]
    return {
        "rollout/staleness_mean": _mean(np.asarray(ages, np.float64)),
        "rollout/staleness_max": float(max(ages, default=0)),
    }


def _parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean of each named part of the rewards, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        parts = sample.reward if isinstance(sample.reward, dict) else None
        for name, value in (parts or sample.metadata.get("reward_parts") or {}).items():
            values.setdefault(name, []).append(float(value))
    return {f"reward/part/{name}": _mean(np.asarray(v)) for name, v in values.items()}


def _outcomes(samples: Sequence[Sample]) -> dict[str, float]:
    counts = Counter(s.reward_outcome for s in samples if s.reward_outcome)
    if samples and not counts:
        return {}
    names = ("value", "invalid", "timeout", "error")
    return {f"reward/outcome/{name}": counts[name] / max(1, len(samples)) for name in names}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
