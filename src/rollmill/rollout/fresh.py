"""When work is done, when it is too old, and how it goes back to being a fresh prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from rollmill.rollout.generate import mask_older_than
from rollmill.rollout.seeds import NUM_SIBLINGS_KEY
from rollmill.sample import Group, Sample, Status, float_array

NOT_TAUGHT = float_array([])
"""Teacher log-probs of an answer that the teacher was asked about and has not scored yet."""


def is_done(sample: Sample) -> bool:
    """Whether a sample needs nothing more: finished, judged and scored by its teacher if it has
    one; or FAILED."""
    is_complete = sample.reward is not None and (
        sample.teacher_log_probs is None or is_taught(sample)
    )
    return sample.status is Status.FAILED or (sample.status.is_finished and is_complete)


def is_taught(sample: Sample) -> bool:
    """Whether a sample has its teacher's log-prob for every response token."""
    scores = sample.teacher_log_probs
    return scores is not None and len(scores) == sample.response_length


def afresh(sample: Sample) -> Sample:
    """The prompt again, as a sample of its own: nothing generated, judged or marked.

    It is another object, so that user code that still runs somewhere can write to the old one
    only. The metadata is copied as it is.
    """
    fresh = copy.copy(sample)
    fresh.metadata = copy.deepcopy(sample.metadata)
    fresh.metadata.pop(NUM_SIBLINGS_KEY, None)
    fresh.restart()
    return fresh


def is_fresh(group: Group) -> bool:
    """Whether a group is a prompt and nothing else: no attempt has tokens or an end."""
    return all(s.status is Status.PENDING and not s.segments for s in group.samples)


def is_unfinished(siblings: Sequence[Sample]) -> bool:
    """Whether an attempt needs more generation: one of its samples does."""
    return not all(sample.status.is_finished for sample in siblings)


def restart_attempts(group: Group, is_given_up: Callable[[Sequence[Sample]], bool]) -> list[Sample]:
    """Put some attempts back to the samples that were given out; the others stay as they are.

    An attempt restarts as a whole, fan-out siblings included: its generate function makes them
    again.

    Args:
        group: changed in place.
        is_given_up: told the samples of one attempt; whether it restarts.

    Returns:
        What is thrown away.
    """
    attempts, lost = group.attempts(), []
    for place, siblings in enumerate(attempts):
        if is_given_up(siblings):
            lost += siblings
            attempts[place] = [afresh(min(siblings, key=lambda s: s.index))]
    group.samples = [sample for siblings in attempts for sample in siblings]
    return lost


def restart_group(group: Group) -> list[Sample]:
    """Back to a fresh prompt: per attempt, the sample that was given out. Returns what is lost."""
    return restart_attempts(group, lambda _: True)


def is_stale(samples: Sequence[Sample], oldest_allowed: int) -> bool:
    """Whether any trainable token was written by weights older than `oldest_allowed`."""
    versions = [v for s in samples if (v := s.oldest_version) is not None]
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
