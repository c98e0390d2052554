"""`deepscaler`: what follows the reasoning, graded as `math`."""

from __future__ import annotations

from rollmill.rewards.graders.base import Params, Score
from rollmill.rewards.graders.math import math_score
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.mathematics.extract import final_answer

_MARKERS = ("</think>", "###Response", "### Response")


class DeepscalerParams(Params):
    """Settings of `deepscaler`."""

    require_marker: bool = False
    """A response without `</think>` or `###Response` has no answer; off, all of it is graded."""


class DeepscalerGrader:
    """1 when the answer after the reasoning equals the label, else 0."""

    def __init__(self, params: DeepscalerParams) -> None:
        self._params = params

    def extract(self, item: RewardInput) -> str | None:
        """The final answer after the last marker."""
        ends = [
            place + len(marker)
            for marker in _MARKERS
            if (place := item.response.rfind(marker)) >= 0
        ]
        if not ends and self._params.require_marker:
            return None
        return final_answer(item.response[max(ends, default=0) :])

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """As `math`."""
        return math_score(answer, item)
