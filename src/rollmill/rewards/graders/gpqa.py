"""`gpqa`: multiple choice. The letter that the answer commits to, or the option's text.

A letter that is only mentioned on the way ("unlike A, …") is no answer. The valid letters come from
the row's choices.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

from rollmill.rewards.graders.base import GradingError, Params, Score, label_text
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.mathematics.clean import as_words, clean
from rollmill.rewards.mathematics.extract import after_thinking, last_boxed, tagged_answer

_OPEN, _CLOSE = r"[*_`\"'({\[$\\]*\s*(?:\\?text(?:bf)?\{)?[({\[]?\s*", r"(?![\w'’])"
_CLOSE_LOWER = r"(?=[)}\]*_`]|\s*[.!,;:)]|\s*$)"
"""After a small letter: what could not follow the article."""
_BEFORE_LETTER = (
    r"(?:^|[.:：=→,]|\b(?:is|be|so|thus|hence|therefore|say|with|option|choice)|[是为选])\s*[\W_]*$"
)
_DENIAL = re.compile(r"(?:\b(?:can)?not|n['’]t|\bnor|\bnever)\b", re.IGNORECASE)
_IN_WORD = r"[^\W\u4e00-\u9fff]"
"""A letter or digit that the next one would make a word with; Chinese has no spaces."""
_LEAD = (
    r"(?:answer|option|choice|selection)(?:\s+(?:choice|option))?"
    r"(?:\s+(?:here|to\s+[^.\n]{1,60}?|for\s+[^.\n]{1,60}?))?"
)
_OPTION_WORD = r"(?:(?:option|choice|answer|letter)\s*:?\s*)?"


class GpqaParams(Params):
    """`gpqa` has no settings."""


@dataclass(frozen=True, slots=True)
class Options:
    """The valid letters, and the options' texts where the row has them."""

    letters: str
    texts: dict[str, str]

    def letter_of(self, text: str) -> str | None:
        """The letter whose option reads as `text`, whole; None when none or several do."""
        wanted = as_words(clean(text))
        found = [k for k, option in self.texts.items() if as_words(clean(option)) == wanted]
        return found[0] if len(found) == 1 else None


class GpqaGrader:
    """1 for the right option, else 0."""

    def __init__(self, params: GpqaParams) -> None:
        self._params = params

    def extract(self, item: RewardInput) -> str | None:
        """The letter, or the option's text that the response ends on."""
        answer = after_thinking(item.response)
        return committed_choice(tagged_answer(answer) or answer, options_of(item))

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """Compare with the right letter; an answer that is no option is invalid."""
        options = options_of(item)
        right = right_letter(item, options)
        letter = _as_letter(answer, options) or options.letter_of(answer)
        if letter is None:
            is_right = right is None and _same_words(answer, label_text(item.label))
            return Score(1.0) if is_right else None
        if right is None:
            raise GradingError(f"expected the label to name an option, found {item.label!r}")
        return Score(float(letter == right), extracted=letter)


def options_of(item: RewardInput) -> Options:
    """The options of a row: `metadata.choices` (list or mapping), `valid_letters`, or A to J."""
    choices = item.metadata.get("choices")
    if isinstance(choices, dict):
        texts = {_letter(key): str(value) for key, value in choices.items() if _letter(key)}
    elif isinstance(choices, list | tuple):
        texts = dict(zip(string.ascii_uppercase, map(str, choices), strict=False))
    else:
        texts = {}
    given = item.metadata.get("valid_letters")
    letters = "".join(map(_letter, given)) if isinstance(given, str | list) else "".join(texts)
    if not letters and not texts and _is_text_label(item.label):
        texts = {"": label_text(item.label)}
    return Options(letters or "ABCDEFGHIJ", texts)


def _letter(given: Any) -> str:
    """The letter that names an option: the first letter or digit of what is given."""
    return re.sub(r"[^A-Z0-9]", "", str(given).upper())[:1]


def _is_text_label(label: Any) -> bool:
    return isinstance(label, str) and len(label.strip(" ().")) > 1


def right_letter(item: RewardInput, options: Options) -> str | None:
    """The right letter: `metadata.correct_letter`, a letter, an index, or an option's text."""
    given = item.metadata.get("correct_letter")
    label = given if given is not None else item.label
    if isinstance(label, bool) or label is None or label == "":
        raise GradingError(f"expected the label to name an option, found {label!r}")
    if isinstance(label, int) and str(label) not in options.letters:
        if not 0 <= label < len(options.letters):
            raise GradingError(f"expected an option's index, found {label} of {options.letters}")
        return options.letters[label]
    text = label_text(label[0] if isinstance(label, list) and len(label) == 1 else label)
    return options.letter_of(text) or _as_letter(text, options)


def committed_choice(response: str, options: Options) -> str | None:
    """The letter or the option's text that a response commits to; None when it does not."""
    boxed = last_boxed(response)
    if boxed is not None:
        return _as_letter(boxed, options) or _as_option(boxed, options)
    letter = _stated_letter(response, options)
    if letter is not None:
        return letter or None
    lines = [line for line in response.splitlines() if line.strip()]
    if not lines:
        return None
    return (
        _as_letter(lines[-1], options)
        or _as_option(lines[-1], options)
        or _only_letter(lines[-1], options)
        or _only_option(lines[-1], options)
    )


def _as_letter(text: str, options: Options) -> str | None:
    """A text that is a letter, perhaps in brackets or with its option's text behind it."""
    pattern = (
        rf"\W*(?:option|choice|answer)?\W*([{options.letters}])(?:\W*|[).:]+\s.*|\s*[-–—]\s.*)"
    )
    text = clean(text)
    match = re.fullmatch(pattern, text, re.DOTALL) or re.fullmatch(
        rf"\W*([{options.letters.lower()}])\W*", text
    )
    if match is None or _names_another(text[match.end(1) :], options):
        return None
    return match.group(1).upper()


def _names_another(rest: str, options: Options) -> bool:
    """Whether a list of options goes on: `(A) (B) (C)`."""
    return re.search(rf"(?<!\w)[(\[]?[{options.letters}][)\]]", rest[1:]) is not None


def _as_option(text: str, options: Options) -> str | None:
    letter = options.letter_of(
        re.sub(r"^\W*(?:final\s+)?answer\W+(?:is\s+)?", "", text, flags=re.I)
    )
    return letter if letter is not None and letter != "" else _same_label(text, options)


def _same_label(text: str, options: Options) -> str | None:
    label = options.texts.get("")
    return text.strip() if label is not None and _same_words(text, label) else None


def _same_words(a: str, b: str) -> bool:
    return as_words(clean(a)) == as_words(clean(b)) != ""


def _stated_letter(response: str, options: Options) -> str | None:
    """The last letter stated to be the answer, statements about wrong ones left out.

    The empty text when the last statement leaves it open: "A or B".
    """
    letters = f"[{options.letters}]"
    letter = rf"{_OPEN}({letters}){_CLOSE}"
    small = rf"[(\[*_`\s]*({letters.lower()}){_CLOSE_LOWER}"
    statements = (
        rf"{_LEAD}\s*(?:must\s+be|should\s+be|would\s+be|will\s+be|is|=|:|：)[\s*_]*:?\s*"
        rf"(?:therefore|thus|clearly|definitely|simply|just)?,?\s*"
        rf"(?:most\s+likely\s+|probably\s+)?{_OPTION_WORD}{letter}",
        rf"{letter}[\s)}}\]*_]*\s(?:is|must\s+be)\s+(?:the\s+|a\s+)?(?:correct|right|best)(?!\w)",
        rf"(?:choose|select|pick|go\s+with|final\s+(?:answer|option|choice))[\s:*_]*"
        rf"{_OPTION_WORD}{letter}",
        rf"(?:correct|right|best)\s+(?:one|{_LEAD})\s*(?:is|:)?\s*{_OPTION_WORD}{letter}",
        rf"{_LEAD}\s*(?:is|:)\s*{_OPTION_WORD}{small}",
    )
    last: tuple[int, str] | None = None
    for statement in statements:
        for match in re.finditer(
            f"(?i:{statement})".replace(letters, f"(?-i:{letters})"), response
        ):
            after = response[match.end(1) :]
            if not _is_english(match.group(1), after):
                chosen = "" if _is_open(after, options) else match.group(1).upper()
                place = match.start(1)
                last = (place, chosen) if last is None or place > last[0] else last
    return last[1] if last is not None else None


def _is_open(after: str, options: Options) -> bool:
    """Whether another letter follows as well: "A or B", "A and C", "A/B"."""
    pattern = rf"[)\]}}*_$\s]*(?:\bor\b|\band\b|/)\s*{_OPEN}{_standing(options)}{_CLOSE}"
    match = re.match(pattern, after)
    return match is not None and not re.match(r"\s+(?:is|are)\b", after[match.end() :])


def _only_letter(line: str, options: Options) -> str | None:
    """The one valid capital that the last sentence of a line ends on or says.

    The article and the pronoun are none, nor is a letter that belongs to a word ("vitamin C").
    """
    sentence = re.split(r"(?<=[.!?])\s+(?=\S)", line.strip())[-1]
    found = {
        match.group(): sentence[: match.start()]
        for match in re.finditer(
            rf"(?<!{_IN_WORD})(?<!['’]){_standing(options)}(?!{_IN_WORD}|['’])", sentence
        )
        if not _is_english(match.group(), sentence[match.end() :])
    }
    if len(found) != 1 or _DENIAL.search(sentence):
        return None
    letter, before = found.popitem()
    return letter if re.search(_BEFORE_LETTER, before, re.IGNORECASE) else None


def _is_english(letter: str, after: str) -> bool:
    """Whether a capital is the article or the pronoun, by what follows it."""
    if letter not in ("A", "I") or re.match(r"\s+[a-z]", after) is None:
        return False
    return re.match(r"\s+(?:is|because|since|as|and|or|nor|but)\b", after) is None


def _standing(options: Options) -> str:
    return f"[{options.letters}]"


def _only_option(line: str, options: Options) -> str | None:
    """The one option whose text stands in a line as whole words."""
    words = f" {re.sub(r'[^0-9a-z.+-]+', ' ', clean(line).lower())} "
    found = []
    for letter, text in options.texts.items():
        option = re.sub(r"[^0-9a-z.+-]+", " ", clean(text).lower()).strip()
        if option and re.search(rf"(?<![\w.+-]){re.escape(option)}(?![\w+-]|\.\d)", words):
            found.append((letter, option))
    longest = [f for f in found if not any(f[1] in g[1] and f is not g for g in found)]
    return (longest[0][0] or options.texts[""]) if len(longest) == 1 else None
