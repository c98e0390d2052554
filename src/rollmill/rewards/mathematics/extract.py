"""Finding the answer that a response commits to.

In order: the last closed `\\boxed{}` or `\\fbox{}`; the last `<answer>x</answer>`; the last
`#### x`; the last "answer is …" or "Answer: …"; the formula or number at the end. A response that
is nothing but an answer is that answer. Every scan is linear in the length of the response.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

MAX_TAIL_CHARS = 4000
"""Without a box, only this much of the end is looked at."""

_TOKEN = re.compile(r"\\\\?(?:boxed|fbox)(?![a-zA-Z])\s*|\\[\\{}]|[{}]")
_UNBRACED = re.compile(r"[^\s{}$\\.,;]+(?:\.\d+)?")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;.]|\\[()\[\]]|\\quad|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*"
)
_HASHES = re.compile(r"^#{4,}[ \t]*(\S.*)$", re.MULTILINE)
_ANCHOR = re.compile(
    r"(?:\banswers?\b|\b(?:solutions|roots)(?=\s+are\b))[ \t*_]*(?:\([^()\n]{0,40}\)[ \t*_]*)?"
    r"(?:(?:is|are|equals|to[^\n.:=]{1,60}?is)\b[ \t]*:?|[:=])(?![ \t*_]*not\b)[ \t*_]*",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?[$€£]?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?(?:[eE][-+]?\d+)?\s?%?(?!\w)"
)
_SENTENCE_END = re.compile(
    r"(?<=[^\d\s])[.!?](?=\s|$)|(?<=\d)[.!?](?=\s+[A-Z]|\s*$)"
    r"|,?\s(?:because|since)\s|,\s(?:not|as|so|where|which)\s"
)
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_MATH_WORDS = frozenset(["sqrt", "sin", "cos", "tan", "log", "exp", "and", "pmod", "mod", "frac"])
_CONNECTIVE = re.compile(r"^(?:so|thus|hence|therefore|then)\b[\s,:]*", re.IGNORECASE)
_THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class Box:
    """A closed box: its place in the text and its content."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    """The outermost closed `\\boxed{…}` and `\\fbox{…}`.

    Also with a space, also `\\boxed 5`, also with two backslashes, as in text that was escaped.
    """
    found: list[Box] = []
    stack: list[tuple[int, int] | None] = []  # opening of a box: (start, content start)
    pending: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        part = token.group()
        if "box" in part:
            pending = (token.start(), token.end())
            if not text.startswith("{", token.end()):
                _add_unbraced(text, token, found, is_inner=any(stack))
                pending = None
        elif part == "{":
            is_box = pending is not None and token.start() == pending[1]
            stack.append((pending[0], token.end()) if is_box and pending else None)
            pending = None
        elif part == "}" and stack:
            opening = stack.pop()
            if opening is not None:
                while found and found[-1].start > opening[0]:
                    found.pop()  # boxes inside this one
                content = text[opening[1] : token.start()]
                if text.startswith("\\\\", opening[0]):  # escaped twice: so is what it holds
                    content = content.replace("\\\\", "\\")
                found.append(Box(opening[0], token.end(), content))
    return found


def _add_unbraced(text: str, token: re.Match[str], found: list[Box], *, is_inner: bool) -> None:
    content = _UNBRACED.match(text, token.end())
    if (
        content is not None
        and not is_inner
        and (token.group()[-1].isspace() or content.group()[0].isdigit())
    ):
        found.append(Box(token.start(), content.end(), content.group()))


def last_boxed(text: str) -> str | None:
    """The content of the last closed box, or None.

    Boxes at the end that only "and", "or" or commas part are one answer, a list.
    """
    found = boxes(text)
    if not found:
        return None
    chosen = [found[-1]]
    for box in reversed(found[:-1]):
        between = text[box.end : chosen[0].start]
        if len(between) > 40 or not _BETWEEN_BOXES.fullmatch(between):
            break
        chosen.insert(0, box)
    contents = [box.content.strip() for box in chosen]
    return ", ".join(dict.fromkeys(contents))


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it when there is none."""
    return text.rpartition(_THINK_END)[2]


def final_answer(response: str) -> str | None:
    """The answer that a response commits to; None when it has none."""
    text = after_thinking(response)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed if boxed.strip() else None
    tagged = tagged_answer(text)
    if tagged is not None and "\n" not in tagged:
        return tagged
    tail = (tagged or text)[-MAX_TAIL_CHARS:]
    if _cut_box(text):
        tail = tail.rpartition("\\boxed")[0]
    searches = [_after_hashes, _after_anchor, _at_the_end]
    for search in searches[:2] if _cut_box(text) else searches:
        answer = search(tail)
        if answer is not None:
            return answer
    return None


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>…</answer>`; None when there is none."""
    head, closing, _ = text.rpartition("</answer>")
    _, opening, content = head.rpartition("<answer>")
    return (content.strip() or None) if closing and opening else None


def _cut_box(text: str) -> bool:
    """Whether the text ends inside a box (cut off by the length limit)."""
    return "\\boxed" in text[-MAX_TAIL_CHARS:]


def _after_hashes(text: str) -> str | None:
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def _after_anchor(text: str) -> str | None:
    anchors = list(_ANCHOR.finditer(text))
    for anchor in reversed(anchors):
        rest = text[anchor.end() :].lstrip("*_ \t\n")
        answer = committed_answer(rest)
        if answer:
            return answer
    return None


def committed_answer(rest: str) -> str | None:
    """The answer at the beginning of what follows "the answer is"."""
    if rest.startswith(("$$", "\\[")) and (display := _MATH.match(rest)):
        return _formula(display)
    line = rest.split("\n", 1)[0]
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0].strip().strip("*_ ")
    if not sentence:
        return None
    if sentence[0] in "$\\([{-+." or sentence[0].isdigit() or not _MATH.search(sentence):
        return sentence
    formulas = list(_MATH.finditer(sentence))
    return sentence[formulas[0].start() : formulas[-1].end()]


def _at_the_end(text: str) -> str | None:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return None
    display = next(iter(deque(_MATH.finditer(text), maxlen=1)), None)
    if display is not None and not text[display.end() :].strip(" \n.*_"):
        return _last_formulas(lines[-1]) or _formula(display)
    last = _CONNECTIVE.sub("", lines[-1].strip("*_` "))
    if is_bare(last):
        return last or None
    if display is not None and display.start() >= text.rfind(lines[-1]):
        return _formula(display)
    numbers = _NUMBER.findall(last)
    if numbers:
        return str(numbers[-1]).strip()
    is_short = len(lines) == 1 and len(last.split()) <= 8
    return last if is_short else None


def _last_formulas(line: str) -> str | None:
    """A line that is nothing but formulas and commas is one answer."""
    rest = _MATH.sub("", line)
    is_list = bool(re.fullmatch(r"[\s,;.*]*|(?:[\s,;.*]|\band\b|\bor\b)*", rest))
    return line if is_list and line else None


def _formula(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def is_bare(line: str) -> bool:
    """Whether a line is an answer by itself: it has a digit or formula and no prose."""
    if len(line) > 400 or not re.search(r"\d|\\[a-zA-Z]|^[a-zA-Z]$|[=^]", line):
        return False
    without_text = re.sub(r"\\text[a-z]*\{[^{}]*\}|\\[a-zA-Z]+", " ", line)
    words = [word.lower() for word in _WORD.findall(without_text)]
    starts_with_number = re.match(r"[-+]?[$€£]?\d[\d,.]*(?:\s|$)", line) is not None
    allowed = 2 if starts_with_number else 0
    return sum(word not in _MATH_WORDS for word in words) <= allowed
