"""Conventions of writing that are not mathematics: what may be left out or written otherwise.

Words for sets, letters of a multiple choice, number bases, times of day, names before a tuple,
a clause about integers behind an answer. Pure text to text or verdict; `equal.py` asks first here.
"""

from __future__ import annotations

import re

from rollmill.rewards.mathematics.clean import as_words
from rollmill.rewards.mathematics.latex import is_text
from rollmill.rewards.mathematics.structure import Many, Node, Scalar, split_commas

_SAME_WORDS = {
    "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}",
    "real numbers": r"\mathbb{R}",
    r"(-\infty,\infty)": r"\mathbb{R}",
    "empty set": r"\emptyset",
    "no solution": r"\emptyset",
    "no solutions": r"\emptyset",
    "no real solution": r"\emptyset",
    "no real solutions": r"\emptyset",
    r"\varnothing": r"\emptyset",
    r"\{\}": r"\emptyset",
    "infinity": r"\infty",
    r"+\infty": r"\infty",
    "undefined": "undefined",
    "does not exist": "dne",
}
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer):?\s+)?\(?\s*([a-zA-Z])\s*\)?[.:]?")
_CHOICE_AND_TEXT = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])(?:\)|[.:](?=\s)))\s*(\S.*)", re.DOTALL)
_LOOSE_SPACE = re.compile(r"(?<![0-9a-zA-Z]) | (?![0-9a-zA-Z])")
_BASE = re.compile(r"\(?(\d[0-9a-zA-Z]*)\)?\s*_\{?\s*(\d+)\s*\}?")
_CLOCK = re.compile(r"(\d{1,2})(:[0-5]\d)?\s*([aApP])\.?[mM]\.?")
_TUPLE_ASSIGNMENT = re.compile(
    r"(\([a-zA-Z](?:_\{?\w\}?)?(?:,\s*[a-zA-Z](?:_\{?\w\}?)?)+\))\s*=\s*(\(.*\))", re.DOTALL
)
_QUALIFIED = re.compile(
    r"((?:(?!\\in(?![a-zA-Z]))[^<>])*?),?\s*(?:where\s+)?"
    r"[a-zA-Z]\s*\\in\s*\\mathbb\{[ZN]\}(?:\^\+)?",
    re.DOTALL,
)


def canonical(text: str) -> str:
    """`text` in a form in which the same words, times and spacings are the same text."""
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        return f"{int(clock[1])}{clock[2] or ':00'} {clock[3].lower()}m"
    words = as_words(text) if is_text(text) else text
    if words is text:
        words = _LOOSE_SPACE.sub("", text)
    return _SAME_WORDS.get(words, words)


def choices_or_bases_equal(left: str, right: str) -> bool | None:
    """The verdict on two letters (of a multiple choice), or numbers of which one has a base."""
    choices = _CHOICE.fullmatch(left), _CHOICE.fullmatch(right)
    if choices[0] is not None and choices[1] is not None:
        return choices[0].group(1).lower() == choices[1].group(1).lower()
    for letter, other in ((choices[0], right), (choices[1], left)):
        labelled = _CHOICE_AND_TEXT.fullmatch(other)
        if letter is not None and labelled is not None:
            return letter.group(1).upper() == (labelled[1] or labelled[2])
    bases = _BASE.fullmatch(left), _BASE.fullmatch(right)
    if bases[0] is not None and bases[1] is not None:
        return bases[0].groups() == bases[1].groups()
    based, bare = (bases[0], right) if bases[0] is not None else (bases[1], left)
    if based is None or not bare.isdigit():
        return None
    return based.group(1) == bare


def option_texts(left: str, right: str) -> tuple[str, str] | None:
    """The two answers without the letter of an option, when only one has it: `(C) 5` and `5`."""
    first, second = _CHOICE_AND_TEXT.fullmatch(left), _CHOICE_AND_TEXT.fullmatch(right)
    if (first is None) == (second is None):
        return None
    return (first[3] if first else left), (second[3] if second else right)


def named_tuples(left: str, right: str) -> tuple[Node, Node] | None:
    """Two answers such as `(x,y) = (1,2)`, as lists of `x = 1, y = 2`; None when one is not."""
    first, second = _TUPLE_ASSIGNMENT.fullmatch(left), _TUPLE_ASSIGNMENT.fullmatch(right)
    if first is None or second is None:
        return None
    return _named_entries(first), _named_entries(second)


def _named_entries(match: re.Match[str]) -> Node:
    """`(x,y) = (1,2)` as the list `x = 1, y = 2`."""
    names, values = split_commas(match[1][1:-1]), split_commas(match[2][1:-1])
    if len(names) != len(values):
        return Scalar(match.group())
    pairs = zip(names, values, strict=True)
    return Many("list", tuple(Scalar(f"{name} = {value}") for name, value in pairs))


def without_extras(left: str, right: str) -> tuple[str, str]:
    """What only one side says beside its answer: names of a tuple, where an integer lies."""
    for pattern, group in ((_TUPLE_ASSIGNMENT, 2), (_QUALIFIED, 1)):
        first, second = pattern.fullmatch(left), pattern.fullmatch(right)
        if first is not None and second is None and first.group(group).strip():
            left = first.group(group).strip()
        if second is not None and first is None and second.group(group).strip():
            right = second.group(group).strip()
    return left, right
