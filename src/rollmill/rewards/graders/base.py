"""What a grader is: it finds the answer, then scores it.

The two steps are apart so that `boxed_X` is "the content of the last box, scored as X" for every
X, and so that "no answer found" is one thing everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from rollmill.rewards.inputs import RewardInput
from rollmill.sample import Reward


class Params(BaseModel):
    """Settings of one reward type; unknown ones are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class GradingError(Exception):
    """The data row cannot be graded (no label, malformed metadata): an `error` outcome."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with its reason.

    Attributes:
        reward: a number or named parts.
        detail: why, for people.
        extracted: what to show as the answer, when it is not the text that was scored.
    """

    reward: Reward
    detail: str | None = None
    extracted: str | None = None


class Grader(Protocol):
    """One reward type with its settings."""

    def extract(self, item: RewardInput) -> str | None:
        """The answer that the response commits to; None when there is none (`invalid`)."""
        ...

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """The score of an extracted answer; None when it turns out to be no answer.

        Raises:
            GradingError: the data row cannot be graded.
        """
        ...


def label_texts(label: Any) -> list[str]:
    """The reference answers of a label: its text, or the texts of a list of alternatives.

    Raises:
        GradingError: there is none (null, empty text, empty list).
    """
    alternatives = label if isinstance(label, list | tuple) else [label]
    texts = [text for one in alternatives if (text := label_text(one)).strip()]
    if not texts:
        raise GradingError(f"expected a label to grade against, found {label!r}")
    return texts


def label_text(label: Any) -> str:
    """One label as text: integers of any size exactly, integral floats without `.0`."""
    if label is None or isinstance(label, dict | list | tuple):
        return ""
    if isinstance(label, bool):
        return "true" if label else "false"
    if isinstance(label, float) and label.is_integer() and abs(label) < 1e16:
        return str(int(label))
    return str(label)
