"""What a batch of rollouts cost in tokens, counted where tokens are made and where they are lost.

Invariant: every token an engine wrote is counted in `num_generated` once, when it arrives; every
generated token that no batch, and no later step, will see is counted in `lost` once, under why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rollmill.sample import Sample


class Loss(StrEnum):
    """Why generated tokens were thrown away."""

    RETRIED = "retried"
    ABORTED = "aborted"
    STALE = "stale"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(slots=True)
class Usage:
    """Engine tokens of one batch. Mutable and shared by everything that works on it.

    Attributes:
        num_generated: tokens that engines wrote.
        lost: tokens thrown away, by reason.
    """

    num_generated: int = 0
    lost: Counter[Loss] = field(default_factory=Counter)

    def begin(self) -> None:
        """A new batch: all counts are 0 again."""
        self.num_generated = 0
        self.lost.clear()

    def lose(self, why: Loss, samples: Iterable[Sample]) -> None:
        """Count what these samples hold as thrown away."""
        self.lost[why] += sum(num_engine_tokens(sample) for sample in samples)


def num_engine_tokens(sample: Sample) -> int:
    """Response tokens of a sample that an engine wrote."""
    return sum(len(segment) for segment in sample.segments if segment.source == "engine")
