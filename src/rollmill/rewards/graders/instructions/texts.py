"""Words, sentences and paragraphs of an answer, as all checks count them."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\n+")
_ABBREVIATIONS = re.compile(
    r"(?:^|[\s(])(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Inc|Ltd|Co|vs|etc|e\.g|i\.e|U\.S|[A-Z])\.$"
)
_STRIPPED = string.punctuation + string.whitespace + "“”‘’…–—"


def words(text: str) -> list[str]:
    """Words: runs of letters and digits, with inner apostrophes and hyphens."""
    return _WORD.findall(text)


def tokens(text: str) -> list[str]:
    """Pieces between spaces, punctuation at their ends taken off, empty ones left out."""
    return [token for piece in text.split() if (token := piece.strip(_STRIPPED))]


def sentences(text: str) -> list[str]:
    """Sentences: cut after `.`, `!`, `?` and at line ends, not after common abbreviations."""
    found: list[str] = []
    for piece in _END.split(text):
        piece = piece.strip()
        if not piece:
            continue
        if found and _ABBREVIATIONS.search(found[-1]):
            found[-1] = f"{found[-1]} {piece}"
        else:
            found.append(piece)
    return found


def paragraphs(text: str, separator: str = r"\n\s*\n") -> list[str]:
    """Parts between separators, empty ones left out."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def lines(text: str) -> list[str]:
    """Lines with something in them."""
    return [line for line in text.splitlines() if line.strip()]


def count_phrase(text: str, phrase: str) -> int:
    """Occurrences of a word or phrase as whole words, whatever the case."""
    pattern = rf"(?<!\w){re.escape(phrase.strip())}(?!\w)"
    return len(re.findall(pattern, text, re.IGNORECASE))


def compares(number: float, relation: str | None, bound: float) -> bool:
    """`at least`, `less than`, `at most`, `exactly`, `more than`; none means at least."""
    match (relation or "at least").strip().lower():
        case "at least":
            return number >= bound
        case "less than":
            return number < bound
        case "at most":
            return number <= bound
        case "more than":
            return number > bound
        case "exactly" | "around":
            return number == bound
        case other:
            raise ValueError(f"unknown relation {other!r}")


def without_punctuation(text: str) -> str:
    """`text` with ASCII punctuation deleted."""
    return text.translate(str.maketrans("", "", string.punctuation))
