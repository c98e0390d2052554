"""`random`: 0 or 1 by a seeded coin, for testing a run without a task.

The coin depends on the run's seed and the sample's index alone: the same run draws the same
rewards, in whatever order and by whichever worker samples are judged.
"""

from __future__ import annotations

import hashlib

from pydantic import Field

from rollmill.rewards.graders.base import Params, Score
from rollmill.rewards.inputs import RewardInput


class RandomParams(Params):
    """Settings of `random`."""

    probability: float = Field(0.5, ge=0, le=1)
    """Chance of a 1."""


class RandomGrader:
    """0 or 1."""

    def __init__(self, params: RandomParams, seed: int) -> None:
        self._params = params
        self._seed = seed

    def extract(self, item: RewardInput) -> str | None:
        """The response, whatever it is."""
        return item.response

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """The coin of this sample."""
        digest = hashlib.sha256(f"{self._seed}/{item.index}".encode()).digest()
        draw = int.from_bytes(digest[:8], "little") / 2**64
        return Score(float(draw < self._params.probability), extracted="")
