"""From a cleaned answer to the LaTeX that the library's parser reads. Pure text to text.

The parser has habits that change the meaning of plain notation: `x^10` is x¹·0 in LaTeX, `1/2x` is
read as 1/(2x), decimals become binary floats, `2 3` becomes a mixed number. They are settled here.
"""

from __future__ import annotations

import itertools
import re

_FUNCTIONS = (
    "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|min|max|gcd|lcm"
)
_PLAIN_FUNCTION = re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])")
_PLAIN_CONSTANT = re.compile(
    r"(?<![\\a-zA-Z])(pi|theta|alpha|beta|infinity|infty|inf|oo)(?![a-zA-Z])"
)
_CONSTANTS = {"infinity": r"\infty", "inf": r"\infty", "oo": r"\infty"}
_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])(sqrt|cbrt)\s*(?=[({\d])")
_PLAIN_POWER = re.compile(r"\^\s*([-+]?\d+(?:\.\d+)?)")
_POWER_OF_FRACTION = re.compile(r"\^\s*\(")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_SIMPLE_QUOTIENT = re.compile(r"(?<![\w}).\\^])(\d+)\s*/\s*(\d+)(?=\s*[a-zA-Z\\(])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*°")
_TRIGONOMETRY = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_RUN = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_KNOWN = frozenset(
    [*_FUNCTIONS.split("|"), "sqrt", "cbrt", "theta", "alpha", "beta", "infinity", "mod"]
)
_SHORT_WORDS = frozenset(("no", "ok", "on", "up", "it", "he", "we"))
_WORD_ARGUMENT = re.compile(r"\\(?:mathbb|mathcal|overline|begin|end)\{[^{}]*\}")


def is_text(text: str) -> bool:
    """Whether a cleaned answer is words, to be compared as words and never parsed.

    Words are runs of three and more letters other than names of functions and plain products such
    as `xyz` or `abc`; two letters side by side are a product.
    """
    rest = _WORD_ARGUMENT.sub(" ", text)
    runs = _RUN.findall(_LATEX_COMMAND.sub(" ", rest))
    if any(not _is_product(run) and run.lower() not in _KNOWN for run in runs):
        return True
    return text.lower() in _SHORT_WORDS


def _is_product(run: str) -> bool:
    """`xyz`, `abc`, `pqr`: letters in the order of the alphabet, each next to the one before."""
    return all(ord(b) - ord(a) in (0, 1) for a, b in itertools.pairwise(run))


def has_trigonometry(text: str) -> bool:
    """Whether a trigonometric function stands in a text: then degrees are not a mere unit."""
    return _TRIGONOMETRY.search(text) is not None


def to_latex(text: str) -> str:
    """The LaTeX of a cleaned answer that is not words."""
    text = text.replace("**", "^")
    if "°" in text and has_trigonometry(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = text.replace("°", r"^{\circ}")
    text = _THOUSANDS.sub(lambda m: m.group().replace(",", ""), text)
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text)
    text = _PLAIN_CONSTANT.sub(lambda m: _CONSTANTS.get(m[1], f"\\{m[1]}") + " ", text)
    text = _braced_after(text, _PLAIN_ROOT, {"sqrt": r"\sqrt", "cbrt": r"\sqrt[3]"})
    text = _braced_after(text, _POWER_OF_FRACTION, None)
    text = _PLAIN_POWER.sub(r"^{\1}", text)
    text = _SIMPLE_QUOTIENT.sub(r"\\frac{\1}{\2}", text)
    text = _DECIMAL.sub(_exact_decimal, text)
    return text.replace("*", r"\cdot ").replace("%", r"\%").strip()


def _exact_decimal(match: re.Match[str]) -> str:
    whole, decimals = match.groups()
    digits = (whole + decimals).lstrip("0") or "0"
    return rf"\frac{{{digits}}}{{1{'0' * len(decimals)}}}"


def _braced_after(text: str, pattern: re.Pattern[str], names: dict[str, str] | None) -> str:
    """Put braces around the argument of a plain root, or of a power in brackets."""
    while (match := pattern.search(text)) is not None:
        if names is None:
            prefix, start = "^", match.end() - 1
        else:
            prefix, start = names[match[1]], match.end()
        end = _argument_end(text, start)
        inner = text[start + 1 : end - 1] if text[start] in "({" else text[start:end]
        text = f"{text[: match.start()]}{prefix}{{{inner}}}{text[end:]}"
    return text


def _argument_end(text: str, start: int) -> int:
    if text[start] not in "({":
        match = re.compile(r"\d+(?:\.\d+)?").match(text, start)
        return match.end() if match is not None else start + 1
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "({") - (text[position] in ")}")
        if depth == 0:
            return position + 1
    return len(text)
