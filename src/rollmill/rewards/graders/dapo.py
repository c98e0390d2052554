"""`dapo`: the last `Answer:` line near the end; +1 right, -1 wrong, with the accuracy beside it.

After the reward of DAPO (arXiv 2503.14476): `score` is the training signal, `acc` the metric.
"""

from __future__ import annotations

import re

from pydantic import Field

from rollmill.rewards.graders.base import Params, Score
from rollmill.rewards.graders.math import math_score
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.mathematics.extract import committed_answer

_ANSWER = re.compile(r"answer\s*[*_]*\s*[:：]\s*[*_]*[ \t]*(?=\S)", re.IGNORECASE)


class DapoParams(Params):
    """Settings of `dapo`."""

    tail_chars: int = Field(300, ge=1)
    """The answer must stand within this many last characters."""


class DapoGrader:
    """`{score: ±1, acc: 0 or 1}`."""

    def __init__(self, params: DapoParams) -> None:
        self._params = params

    def extract(self, item: RewardInput) -> str | None:
        """What the last `Answer:` line in the tail says."""
        tail = item.response[-self._params.tail_chars :]
        found = list(_ANSWER.finditer(tail))
        return committed_answer(tail[found[-1].end() :]) if found else None

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """Equality with the label as mathematics."""
        accuracy = math_score(answer, item).reward
        assert isinstance(accuracy, float)
        return Score({"score": 1.0 if accuracy else -1.0, "acc": accuracy})
