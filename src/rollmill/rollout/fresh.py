"""When work is done, when it is too old, and how it goes back to being a fresh prompt."""

from __future__ import annotations

import copy

from rollmill.rollout.generate import mask_older_than
from rollmill.rollout.seeds import NUM_SIBLINGS_KEY
from rollmill.sample import Group, Sample, Status


def is_done(sample: Sample) -> bool:
    """Whether a sample needs nothing more: finished and judged, or FAILED."""
    is_judged = sample.reward is not None
    return sample.status is Status.FAILED or (sample.status.is_finished and is_judged)


def afresh(sample: Sample) -> Sample:
    """The prompt again, as a sample of its own: nothing generated, judged or marked.

    It is another object, so that user code that still runs somewhere can write to the old one
    only. The metadata is copied as it is.
    """
    fresh = copy.copy(sample)
    fresh.metadata = copy.deepcopy(sample.metadata)
    fresh.metadata.pop(NUM_SIBLINGS_KEY, None)
    fresh.restart()
    fresh.in_loss = True
    fresh.teacher_log_probs = None
    fresh.routed_experts = None
    return fresh


def restart_group(group: Group) -> None:
    """Back to a fresh prompt: per attempt, the sample that was given out."""
    given = [min(siblings, key=lambda s: s.index) for siblings in group.attempts()]
    group.samples = [afresh(sample) for sample in given]


def is_stale(group: Group, oldest_allowed: int) -> bool:
    """Whether any trainable token was written by weights older than `oldest_allowed`."""
    versions = [v for s in group.samples if (v := s.oldest_version) is not None]
    return bool(versions) and min(versions) < oldest_allowed


def is_all_stale(group: Group, oldest_allowed: int) -> bool:
    """Whether a finished group has only such tokens: masked, it would teach nothing."""
    return group.is_finished and not any(
        segment.trainable and (segment.weight_version or 0) >= oldest_allowed
        for sample in group.samples
        for segment in sample.segments
    )


def mask_stale(group: Group, oldest_allowed: int) -> None:
    """Take tokens of older weights out of the loss; newer ones, also of siblings, stay in."""
    for sample in group.samples:
        mask_older_than(sample, oldest_allowed)
