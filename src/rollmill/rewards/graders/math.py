"""`math`: the last box or the final answer, equal to the label as mathematics or as whole text."""

from __future__ import annotations

from rollmill.rewards.graders.base import GradingError, Params, Score, label_texts
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.mathematics.equal import answers_equal
from rollmill.rewards.mathematics.extract import after_thinking, boxes, final_answer, last_boxed


class MathParams(Params):
    """Settings of `math`."""

    require_box: bool = False
    """Without a `\\boxed{}` there is no answer."""


class MathGrader:
    """1 when the answer equals the label (or one of a list of labels), else 0."""

    def __init__(self, params: MathParams) -> None:
        self._params = params

    def extract(self, item: RewardInput) -> str | None:
        """The content of the last box, else the final answer in words."""
        if self._params.require_box:
            content = last_boxed(after_thinking(item.response))
            return content if content is not None and content.strip() else None
        return final_answer(item.response)

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """Compare with each label."""
        return math_score(answer, item)


def math_score(answer: str, item: RewardInput) -> Score:
    """1 or 0; raises GradingError without a label."""
    labels = [_unboxed(text) for text in label_texts(item.label)]
    if not any(label.strip() for label in labels):
        raise GradingError(f"expected an answer in the label, found {item.label!r}")
    is_right = any(answers_equal(answer, label) for label in labels)
    return Score(float(is_right))


def _unboxed(label: str) -> str:
    """A label may be a worked solution that ends in a box, or GSM8K's `… #### 5`."""
    if boxes(label):
        return last_boxed(label) or ""
    head, marker, tail = label.rpartition("####")
    return tail.strip() if marker and (head.endswith("\n") or not head) else label
