"""`f1`: token F1 as in SQuAD (arXiv 1606.05250), best over the labels.

Text is lower-cased, stripped of punctuation and articles and cut at spaces. Unlike the original,
numbers stay whole: `3.5`, `-5`, `1/2` and `2020-01-05` are one token each, and `-5` is not `5`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

from rollmill.rewards.graders.base import Params, Score, label_texts
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.mathematics.extract import after_thinking

_NUMBER = re.compile(r"(?:(?<![\w.])[-+])?\d+(?:[-/:.,]\d+)*|(?<![\w.])[-+]?\.\d+")
"""With what is written to it it stays one token: `3.5km`, `1.5M`, `v2.0`."""
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_ARTICLES = frozenset(("a", "an", "the"))
_EXACT = frozenset(("yes", "no", "noanswer"))
_MINUS = str.maketrans(dict.fromkeys("−–﹣－", "-"))


class F1Params(Params):
    """`f1` has no settings."""


class F1Grader:
    """The F1 of shared tokens, 0 to 1."""

    def __init__(self, params: F1Params) -> None:
        self._params = params

    def extract(self, item: RewardInput) -> str | None:
        """All that follows the reasoning."""
        answer = after_thinking(item.response).strip()
        return answer or None

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """The best F1 over the labels."""
        return Score(max(f1(answer, label) for label in label_texts(item.label)))


def f1(answer: str, label: str) -> float:
    """Token F1 of two texts; raw equality when one has no tokens left."""
    left, right = tokens(answer), tokens(label)
    if not left or not right:
        return float(answer.split() == label.split())
    if left != right and (_is_exact(left) or _is_exact(right)):
        return 0.0
    shared = sum((Counter(left) & Counter(right)).values())
    return 2 * shared / (len(left) + len(right))


def _is_exact(words: list[str]) -> bool:
    return len(words) == 1 and words[0] in _EXACT


def tokens(text: str) -> list[str]:
    """The tokens of a text, normalised."""
    text = text.translate(_MINUS).lower()
    pieces: list[str] = []
    position = 0
    for number in _NUMBER.finditer(text):
        pieces += (_without_punctuation(text[position : number.start()]), _number(number.group()))
        position = number.end()
    pieces.append(_without_punctuation(text[position:]))
    return [word for word in "".join(pieces).split() if word not in _ARTICLES]


def _number(text: str) -> str:
    text = text.removeprefix("+")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _without_punctuation(text: str) -> str:
    return "".join(c for c in text if c not in string.punctuation and not _is_punctuation(c))


def _is_punctuation(character: str) -> bool:
    return not character.isascii() and unicodedata.category(character).startswith("P")
