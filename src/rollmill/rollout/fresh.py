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


def start_afresh(sample: Sample) -> None:
    """Back to the prompt: nothing generated, judged or marked; what user code put into the metadata
    stays."""
    sample.restart()
    sample.metadata.pop(NUM_SIBLINGS_KEY, None)
    sample.in_loss = True
    sample.teacher_log_probs = None
    sample.routed_experts = None


def restart_group(group: Group) -> None:
    """Back to a fresh prompt: one pending sample per attempt, the one that was given out."""
    group.samples = [min(siblings, key=lambda s: s.index) for siblings in group.attempts()]
    for sample in group.samples:
        start_afresh(sample)


def fresh_copy(group: Group) -> Group:
    """A fresh group for the same prompt, apart from samples that somebody may still write to."""
    twins = [copy.copy(sample) for sample in group.samples]
    for twin in twins:
        twin.metadata = copy.deepcopy(twin.metadata)
    fresh = Group(group.group_index, twins)
    restart_group(fresh)
    return fresh


def is_stale(group: Group, oldest_allowed: int) -> bool:
    """Whether any trainable token was written by weights older than `oldest_allowed`."""
    versions = [v for s in group.samples if (v := s.oldest_version) is not None]
    return bool(versions) and min(versions) < oldest_allowed


def mask_stale(group: Group, oldest_allowed: int) -> None:
    """Take tokens of older weights out of the loss; newer ones, also of siblings, stay in."""
    for sample in group.samples:
        mask_older_than(sample, oldest_allowed)
