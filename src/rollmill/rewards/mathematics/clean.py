"""One notation for an answer: LaTeX dressing, unicode and markdown taken off. Pure text to text.

Nothing here changes what an answer means; what cannot be decided without looking at the other
answer (a comma as thousands separator or list, a per cent sign, a unit) is left alone.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_UNICODE = {
    **dict.fromkeys("−–—‒﹣－‑", "-"),
    "×": r"\times ",
    "⋅": r"\cdot ",
    "·": r"\cdot ",
    "∙": r"\cdot ",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\leq ",
    "≥": r"\geq ",
    "≠": r"\neq ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∅": r"\emptyset ",
    "∈": r"\in ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "∘": "°",
    "º": "°",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "’": "'",
    "′": "'",
    "“": '"',
    "”": '"',
    "，": ",",
    "‹": "<",
    "\u200b": "",
    "\ufeff": "",
    "\u2061": "",
    "\u2062": "",
}
_UNICODE_TABLE = str.maketrans(_UNICODE)
_ROOT = re.compile(r"[√∛∜]\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-zA-Z]))")

_DROP = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|bigg|Bigg|displaystyle|textstyle|limits"
    r"|quad|qquad)(?![a-zA-Z])\s?\.?(?=[^\d]|$)"
)
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|rm|bf|mbox|hbox"
    r"|operatorname|boldsymbol|bm|emph|underline)\s*\*?\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*(\d)\s*(\d)")
_SHORT_FRACTION = re.compile(
    r"\\frac\s*(\d|[a-zA-Z](?![a-zA-Z])|\{[^{}]*\})\s*(\d|[a-zA-Z](?![a-zA-Z])|\{[^{}]*\})"
)
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z](?![a-zA-Z]))")
_MODULO = re.compile(r"\(?\\[pb]?mod(?![a-zA-Z])\s*\{?\s*(\w+)\s*\}?\s*\)?")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z])|\\circ(?![a-zA-Z])")
_MARKDOWN = re.compile(r"(?<!\\)(?:(\*\*|__)(.+?)\1|(?<!`)(`{1,3})(?!`)([^`]+)\3(?!`))")
_SPACES = re.compile(r"\s+")
_LATEX_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|~")
_FONT = re.compile(r"\{\\(?:bf|rm|it|sf|tt|em|cal)\s+([^{}]*)\}")
_UNSEEN = re.compile(
    r"\\(?:(?:text)?color\s*\{[^{}]*\}|h?phantom\s*\{[^{}]*\}"
    r"|(?:bf|rm|it|sf|tt|em|bfseries|large|Large)(?![a-zA-Z])\s*(?!\{))"
)
"""Colours, fonts that are switched on, and what only takes room."""
_THIN_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]|\{,\}|\\,|'|_)(?=\d{3}(?!\d))")
_SEGMENT = re.compile(
    r"\\(?:vec|overrightarrow)\s*(?:\{(\w+)\}|(?<=\s)(\w))|\\overline\s*\{([A-Z]{2})\}"
)
_BLACKBOARD = re.compile(r"\\mathbb\s*([A-Z])")
_NAMES = {
    r"\le": r"\leq", r"\ge": r"\geq", r"\ne": r"\neq", r"\not=": r"\neq", r"\not =": r"\neq",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\langle": "(", r"\rangle": ")", r"\lg": r"\log_{10}",
}  # fmt: skip
_NAME = re.compile(r"\\(?:not ?=|(?:le|ge|ne|lbrace|rbrace|langle|rangle|lg)(?![a-zA-Z]))")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_ESCAPED = re.compile(r"\\([%#&])")


def clean(text: str) -> str:
    """`text` in one notation; the empty string when nothing is left."""
    if not text.isascii():
        text = _from_unicode(text)
    text = text.strip()
    if text.isalnum():
        return text
    while (box := _BOX.fullmatch(text)) is not None:
        text = box.group(1).strip()
    text = _undressed(text)
    text = _plain_latex(text)
    text = _SPACES.sub(" ", text).strip()
    return _without_final_stop(text)


def _from_unicode(text: str) -> str:
    text = _SUPERSCRIPT_RUN.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", text)
    text = _ROOT.sub(_root_of, text)
    text = text.translate(_UNICODE_TABLE)
    if text.isascii():
        return text
    return "".join(_plain_character(c) for c in text)


def _root_of(match: re.Match[str]) -> str:
    index = {"√": "", "∛": "[3]", "∜": "[4]"}[match.group()[0]]
    return rf"\sqrt{index}{{{next(g for g in match.groups() if g)}}}"


def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    if unicodedata.category(character) == "Cf":  # marks of direction, soft hyphens: not seen
        return ""
    digit = unicodedata.digit(character, None)
    if digit is not None:
        return str(digit)
    decomposed = unicodedata.normalize("NFKC", character)
    if "⁄" in decomposed:  # vulgar fractions: ½
        top, _, bottom = decomposed.partition("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}"
    return decomposed


def _undressed(text: str) -> str:
    """Math delimiters and markdown taken off; `\\$` becomes a plain `$`, meaning dollars."""
    text = _MARKDOWN.sub(lambda m: m[2] or m[4], text)
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.replace(opening, " ").replace(closing, " ")
    bare = text.replace(r"\$", "")
    if bare.count("$") > 1:
        text = re.sub(r"(?<!\\)\$", " ", text)
    return text.replace(r"\$", "$")


def _plain_latex(text: str) -> str:
    if "\\" in text:
        text = _THIN_THOUSANDS.sub("", text)
        text = _UNSEEN.sub("", _FONT.sub(r"\1", _DROP.sub("", text)))
        text = _LATEX_SPACES.sub(" ", text)
        text = _FRACTION.sub(r"\\frac", text)
        for _ in range(3):  # \text inside \text
            text = _TEXT.sub(r" \1 ", text)
        text = _SHORT_FRACTION.sub(lambda m: rf"\frac{_braced(m[1])}{_braced(m[2])}", text)
        text = _BINOMIAL.sub(r"\\binom{\1}{\2}", text)
        text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
        text = _DEGREES.sub("°", text)
        text = _MODULO.sub(r" (mod \1)", text)
        text = _ESCAPED.sub(r"\1", text)
        text = _NAME.sub(lambda m: _NAMES[m.group()], text)
        text = _SEGMENT.sub(lambda m: m[1] or m[2] or m[3], text)
        text = _BLACKBOARD.sub(r"\\mathbb{\1}", text)
    else:
        text = _THIN_THOUSANDS.sub("", text)
    return text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


def _without_final_stop(text: str) -> str:
    while text and text[-1] in ".,;:\\" and not text.endswith("..."):
        text = text[:-1].rstrip()
    return text


_ARTICLE = re.compile(r"^(?:the|an|a)\s+(?=\w{2,})")


def as_words(text: str) -> str:
    """`text` for comparing whole texts: case, spaces, quotes and a leading article put aside."""
    words = _SPACES.sub(" ", text.casefold()).strip(" \"'.,;:!?")
    return _ARTICLE.sub("", words)
