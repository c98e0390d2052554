"""What a plan simulates, and what it finds of each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Schedule:
    """What is run, as far as time is concerned.

    Attributes:
        batch_size: groups per step.
        num_answers: answers per group.
        max_new_tokens: longest answer.
        submit_size: groups asked for at a time.
        is_ranked: whether all of `submit_size` are waited for, and the best kept.
        is_partial: whether unfinished answers are gone on with in the next step.
        max_staleness: versions that rollouts may be ahead; None trains synchronously.
        num_engines: engines.
        places: answers that one engine decodes together.
        max_requests: requests in flight over all engines.
        num_graders: workers that judge.
    """

    batch_size: int
    num_answers: int
    max_new_tokens: int
    submit_size: int
    is_ranked: bool = False
    is_partial: bool = False
    max_staleness: int | None = None
    num_engines: int = 1
    places: int = 64
    max_requests: int = 256
    num_graders: int = 1


@dataclass(frozen=True)
class StepTimes:
    """One simulated step.

    Attributes:
        seconds: of the step.
        rollout_s: that the trainer waited for its batch.
        train_s: training.
        sync_s: moving the weights.
        engines_idle: share of the step in which an engine had nothing to write, mean of them.
        tokens: response tokens of the batch.
        written: tokens that engines wrote.
        staleness: mean age of the batch's groups, in weight versions.
        max_staleness: the age of the oldest.
    """

    seconds: float
    rollout_s: float
    train_s: float
    sync_s: float
    engines_idle: float
    tokens: float
    written: float
    staleness: float
    max_staleness: int


def mean_of(steps: list[StepTimes], skip: int = 1) -> StepTimes:
    """The mean step, without the first `skip`: they start with idle engines."""
    kept = steps[skip:] or steps

    def mean(name: str) -> float:
        return float(np.mean([getattr(step, name) for step in kept]))

    return StepTimes(
        seconds=mean("seconds"),
        rollout_s=mean("rollout_s"),
        train_s=mean("train_s"),
        sync_s=mean("sync_s"),
        engines_idle=mean("engines_idle"),
        tokens=mean("tokens"),
        written=mean("written"),
        staleness=mean("staleness"),
        max_staleness=max(step.max_staleness for step in kept),
    )
