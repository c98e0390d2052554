"""Quantities read exactly: integers of any size, decimals, fractions, mixed numbers, per cent.

This is the fast path: most answers are plain numbers and never reach the library. It is also the
exact path: values are `Fraction`s of the digits as written, never binary floats. Integers too long
for quick arithmetic are kept as their digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rollmill.rewards.mathematics.units import Unit, find_unit
from rollmill.rewards.mathematics.words import SCALES, number_in_words

MAX_DIGITS = 2000
"""Longer numbers are compared digit by digit (integers) or as text."""
MAX_EXPONENT = 2000

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"{_DECIMAL}(?!\d)")
_LATEX_FRACTION = re.compile(r"\\frac\{\s*([-+]?[\d.,]+)\s*\}\{\s*([-+]?[\d.,]+)\s*\}")
_PLAIN_FRACTION = re.compile(rf"\(?({_DECIMAL})\)?\s?/\s?\(?([-+]?{_DECIMAL})\)?(?![\d/])")
_MIXED = re.compile(r"(\d+)(?:\s+|-|\s*\+\s*)(\d+)\s?/\s?(\d+)(?![\d/])")
_LATEX_MIXED = re.compile(r"(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_POWER_OF_TEN = re.compile(
    r"\s*(?:\\times|\\cdot|\*|x|X)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\s?\d+)\s*\}|\(?([-+]?\d+)\)?)"
)
_BARE_POWER_OF_TEN = re.compile(r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))")
_E_POWER = re.compile(r"[eE]([-+]?\d+)(?![\d.])")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\overline|\\bar|\\dot)\s*\{?(\d+)\}?|(\d*)\.(\d*)\((\d+)\)"
)
_GOING_ON = re.compile(
    r"(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,6}?)\4+)(?:\.\.\.|\\[lc]?dots(?![a-zA-Z]))"
)
"""`0.1666...`: digits that have come again often enough to be the period."""
_SPACED_THOUSANDS = re.compile(r"\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SIGN = re.compile(r"\s*([-+])\s*")
_CURRENCY = re.compile(r"(?:US|A|C|CA|AU)?([$€£¥₹])\s?|(USD|EUR|GBP|Rs(?=\.?\s))\.?\s")
_WORDS = re.compile(r"(?:of )?[a-z]{3,}(?:[ -][a-z]+)*")
_MATH_WORDS = """pi sqrt sin cos tan cot sec csc log ln exp mod and or infinity theta choose minus
plus times over divided squared cubed not to from if when where root percent"""
_NOT_DESCRIPTIONS = frozenset(_MATH_WORDS.split())
_PERCENT = ("%", "percent", "per cent", "pct", "% percent")
_TWO_UNITS = re.compile(
    rf"({_DECIMAL})\s*([a-zA-Z]+)(?:,\s*|\s+)(?:and\s+)?({_DECIMAL})\s*([a-zA-Z]+)"
)
_LONG_INTEGER = re.compile(r"([-+]?)\s*0*(\d{1,3}(?:,\d{3})+|\d+)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as written, with what stood behind it.

    Attributes:
        value: the exact number, per cent sign not applied.
        is_percent: whether a per cent sign or word followed.
        unit: the unit, when one of those we know was given.
    """

    value: Fraction
    is_percent: bool = False
    unit: Unit | None = None


def read_quantity(text: str) -> Quantity | None:
    """The quantity that a cleaned text is as a whole, or None."""
    if text.isascii() and text.isdigit():
        return Quantity(Fraction(int(text))) if len(text) <= MAX_DIGITS else None
    if len(text) > MAX_DIGITS:
        return None
    sign, position = _sign(text, 0)
    currency = _CURRENCY.match(text, position)
    if currency is not None:
        position = currency.end()
        if sign == 1:
            sign, position = _sign(text, position)
    number = _number(text, position)
    if number is None:
        return _worded(text)
    value, position = number
    value, rest = _scaled(value, text[position:])
    unit = find_unit(currency.group(1) or currency.group(2)) if currency is not None else None
    return _with_rest(sign * value, rest, unit) or _in_two_units(text)


def quantities_equal(a: Quantity, b: Quantity) -> bool:
    """Equality of quantities: exact values; units converted, and ignored when one has none.

    A per cent sign may be left out on either side: 50 % equals 50 and 0.5.
    """
    left, right = a.value, b.value
    if a.unit is not None and b.unit is not None:
        if a.unit.dimension != b.unit.dimension:
            return False
        left, right = left * a.unit.factor, right * b.unit.factor
    if a.is_percent == b.is_percent:
        return left == right
    percent, other = (left, right) if a.is_percent else (right, left)
    return other in (percent, percent / 100)


def long_integers_equal(a: str, b: str) -> bool | None:
    """Whether two integers are equal, by their digits; None when one is not an integer."""
    left, right = _LONG_INTEGER.fullmatch(a), _LONG_INTEGER.fullmatch(b)
    if left is None or right is None:
        return None
    digits = [m.group(2).replace(",", "") for m in (left, right)]
    signs = [m.group(1) == "-" for m in (left, right)]
    return digits[0] == digits[1] and (signs[0] == signs[1] or digits[0] == "0")


def _sign(text: str, position: int) -> tuple[int, int]:
    match = _SIGN.match(text, position)
    if match is None:
        return 1, position
    return (-1 if match.group(1) == "-" else 1), match.end()


def _number(text: str, position: int) -> tuple[Fraction, int] | None:
    """The unsigned number that begins at `position`, and where it ends."""
    for pattern, value in (
        (_LATEX_MIXED, _mixed_value),
        (_MIXED, _mixed_value),
        (_LATEX_FRACTION, _fraction_value),
        (_PLAIN_FRACTION, _fraction_value),
        (_REPEATING, _repeating_value),
        (_GOING_ON, _repeating_value),
        (_BARE_POWER_OF_TEN, _power_value),
    ):
        match = pattern.match(text, position)
        if match is not None:
            read = value(match)
            return None if read is None else (read, match.end())
    spaced = _SPACED_THOUSANDS.fullmatch(text, position)
    if spaced is not None:
        return Fraction(spaced.group().replace(" ", "")), spaced.end()
    match = _NUMBER.match(text, position)
    if match is None:
        return None
    return _with_exponent(_decimal(match.group()), text, match.end())


def _with_exponent(value: Fraction, text: str, position: int) -> tuple[Fraction, int] | None:
    match = _POWER_OF_TEN.match(text, position) or _E_POWER.match(text, position)
    if match is None:
        return value, position
    exponent = int(next(g for g in match.groups() if g).replace(" ", ""))
    if abs(exponent) > MAX_EXPONENT:
        return None
    return value * Fraction(10) ** exponent, match.end()


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _fraction_value(match: re.Match[str]) -> Fraction | None:
    if not re.fullmatch(rf"[-+]?{_DECIMAL}", match[1]) or not re.fullmatch(
        rf"[-+]?{_DECIMAL}", match[2]
    ):
        return None
    bottom = _decimal(match[2])
    return None if bottom == 0 else _decimal(match[1]) / bottom


def _mixed_value(match: re.Match[str]) -> Fraction | None:
    bottom = int(match[3])
    return None if bottom == 0 else int(match[1]) + Fraction(int(match[2]), bottom)


def _repeating_value(match: re.Match[str]) -> Fraction | None:
    whole, fixed, repeated = [g for g in match.groups() if g is not None]
    start = Fraction(int(whole or "0")) + Fraction(int(fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))


def _power_value(match: re.Match[str]) -> Fraction | None:
    exponent = int(match[1] or match[2])
    return None if abs(exponent) > MAX_EXPONENT else Fraction(10) ** exponent


def _scaled(value: Fraction, rest: str) -> tuple[Fraction, str]:
    """Words like "million" behind a number."""
    words = rest.split()
    while words and words[0].lower() in SCALES:
        value *= SCALES[words.pop(0).lower()]
        rest = " " + " ".join(words)
    return value, rest


def _with_rest(value: Fraction, rest: str, unit: Unit | None) -> Quantity | None:
    """A number and what stands behind it: nothing, per cent, a unit, or a description."""
    is_glued = not rest.startswith(" ")
    rest = rest.strip()
    if not rest:
        return Quantity(value, unit=unit)
    if rest in _PERCENT:
        return Quantity(value, is_percent=True, unit=unit)
    found = find_unit(rest)
    if found is not None and not (is_glued and len(rest) == 1 and rest.isalpha()):
        return Quantity(value, unit=found)
    is_description = not is_glued and _WORDS.fullmatch(rest.lower()) is not None
    if is_description and not _NOT_DESCRIPTIONS.intersection(re.split(r"[ -]", rest.lower())):
        return Quantity(value, unit=unit)
    return None


def _in_two_units(text: str) -> Quantity | None:
    """`5 ft 6 in`, `1 hour and 30 minutes`: the larger unit first, the value in the smaller."""
    match = _TWO_UNITS.fullmatch(text)
    if match is None:
        return None
    larger, smaller = find_unit(match[2]), find_unit(match[4])
    if larger is None or smaller is None or larger.dimension != smaller.dimension:
        return None
    if larger.factor <= smaller.factor:
        return None
    value = _decimal(match[1]) * larger.factor / smaller.factor + _decimal(match[3])
    return Quantity(value, unit=smaller)


def _worded(text: str) -> Quantity | None:
    """A number in words, perhaps with per cent behind it."""
    for word in ("percent", "per cent"):
        if text.endswith(f" {word}"):
            value = number_in_words(text.removesuffix(word))
            return None if value is None else Quantity(value, is_percent=True)
    value = number_in_words(text)
    return None if value is None else Quantity(value)
