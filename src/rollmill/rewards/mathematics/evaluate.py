"""The quick way to compare common expressions: their values at fixed points.

A small recursive-descent reader takes what most answers consist of (numbers, letters, sums,
products, quotients, powers, fractions, roots, π, e, i), exactly as the library would read it, and
evaluates it: in exact fractions as long as the numbers are rational, to 50 digits after. Two
expressions with equal values at all points are equal. Anything else, whatever is ambiguous and
whatever grows large is left to the library (`None`). About twenty times quicker than parsing with
the library's grammar.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import factorial, isqrt
from typing import Any

import mpmath  # type: ignore[import-untyped]

from rollmill.rewards.mathematics.latex import to_latex

_context = mpmath.MPContext()
_context.dps = 50
_TOLERANCE = _context.mpf(10) ** -38
MAX_BITS = 20_000
MAX_CHARS = 500
MAX_DEPTH = 40
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83,
           89, 97, 101)  # fmt: skip
POINTS = ((1, 7), (-1, 11), (1, 1), (-3, 13))
"""Letter number k has the value `a · prime(k) / b + 1 / prime(25 - k)` at the point (a, b)."""

Value = Any  # Fraction while exact, else mpf or mpc
_TOKEN = re.compile(
    r"\s*(?:(\d+)|(\\frac|\\sqrt|\\pi|\\cdot|\\times|\\left|\\right)(?![a-zA-Z])|([a-zA-Z])"
    r"|([-+*/^(){}\[\]!]))"
)


class _CannotTellError(Exception):
    """The expression is outside of what is read here."""


def values_equal(a: str, b: str) -> bool | None:
    """Whether two cleaned expressions are equal; None when this cannot be told here."""
    left, right = fingerprint(a), fingerprint(b)
    if left is None or right is None:
        return None
    pairs = [(x, y) for x, y in zip(left, right, strict=True) if x is not None and y is not None]
    return all(_close(x, y) for x, y in pairs) if pairs else None


@lru_cache(maxsize=4096)
def fingerprint(text: str) -> tuple[Value | None, ...] | None:
    """The values of an expression at the points (None: not real there), or None."""
    if len(text) > MAX_CHARS or "=" in text or "," in text:
        return None
    try:
        tokens = _tokens(to_latex(text))
        letters = sorted({token for token in tokens if token.isalpha() and token not in "ei"})
        points = POINTS if letters else POINTS[:1]
        values = tuple(_value(tokens, _assigned(letters, point)) for point in points)
    except (_CannotTellError, ZeroDivisionError, OverflowError, ValueError):
        return None
    if not letters:
        return values * len(POINTS)
    return tuple(None if isinstance(v, _context.mpc) else v for v in values)


def _close(x: Value, y: Value) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    x, y = _float(x), _float(y)
    return bool(abs(x - y) <= _TOLERANCE * max(1, abs(x), abs(y)))


def _float(value: Value) -> Value:
    if isinstance(value, Fraction):
        return _context.mpf(value.numerator) / value.denominator
    return value


def _assigned(letters: list[str], point: tuple[int, int]) -> Mapping[str, Fraction]:
    """A value for each letter, the same in every expression."""
    top, bottom = point
    values: dict[str, Fraction] = {}
    for letter in letters:
        k = (ord(letter.lower()) - ord("a")) % 26
        shift = 2 if letter.isupper() else 1
        values[letter] = Fraction(top * _PRIMES[k], bottom) + Fraction(shift, _PRIMES[25 - k])
    return values


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            if text[position:].isspace():
                break
            raise _CannotTellError
        tokens.append(next(group for group in match.groups() if group is not None))
        position = match.end()
    tokens = [token for token in tokens if token not in ("\\left", "\\right")]
    if any(a.isdigit() and b.isdigit() for a, b in itertools.pairwise(tokens)):
        raise _CannotTellError
    return tokens


def _value(tokens: list[str], letters: Mapping[str, Fraction]) -> Value:
    reader = _Reader(tokens, letters)
    value = reader.sum()
    if reader.peek() != "":
        raise _CannotTellError
    return value


class _Reader:
    """Reads and evaluates at once; one token of lookahead."""

    def __init__(self, tokens: list[str], letters: Mapping[str, Fraction]) -> None:
        self._tokens = tokens
        self._letters = letters
        self._position = 0
        self._depth = 0

    def peek(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self) -> str:
        token = self.peek()
        self._position += 1
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise _CannotTellError

    def sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _CannotTellError
        sign = -1 if self.peek() == "-" else 1
        if self.peek() in ("-", "+"):
            self._take()
        total = self._product() * sign
        while self.peek() in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            total = _add(total, self._product() * sign)
        self._depth -= 1
        return total

    def _product(self) -> Value:
        value = self._power()
        divided = False
        while True:
            token = self.peek()
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                value, divided = _multiply(value, self._signed_power()), False
            elif token == "/":
                self._take()
                value, divided = _divide(value, self._signed_power()), True
            elif token and token not in "+-)}]^!":
                if divided or token == "[":
                    raise _CannotTellError  # 1/2x: (1/2)x or 1/(2x)
                if token.isdigit() or (
                    token == "\\frac" and self._tokens[self._position - 1].isdigit()
                ):
                    raise _CannotTellError  # a mixed number, or juxtaposed numbers
                value = _multiply(value, self._power())
            else:
                return value

    def _signed_power(self) -> Value:
        if self.peek() == "-":
            self._take()
            return -self._power()
        return self._power()

    def _power(self) -> Value:
        base = self._atom()
        while self.peek() == "!":
            self._take()
            base = _factorial(base)
        if self.peek() != "^":
            return base
        self._take()
        exponent = self._braced() if self.peek() == "{" else self._atom()
        if self.peek() in ("^", "!"):
            raise _CannotTellError
        return _raise(base, exponent)

    def _atom(self) -> Value:
        token = self._take()
        if token.isdigit():
            if len(token) > 4000:
                raise _CannotTellError
            return Fraction(int(token))
        if token == "(":
            value = self.sum()
            self._expect(")")
            return value
        if token == "{":
            self._position -= 1
            return self._braced()
        if token == "\\frac":
            return _divide(self._braced(), self._braced())
        if token == "\\sqrt":
            return self._root()
        if token == "\\pi":
            return +_context.pi
        if token == "e":
            return +_context.e
        if token == "i":
            return _context.mpc(0, 1)
        if token.isalpha() and len(token) == 1:
            return self._letters[token]
        raise _CannotTellError

    def _braced(self) -> Value:
        self._expect("{")
        value = self.sum()
        self._expect("}")
        return value

    def _root(self) -> Value:
        degree = Fraction(2)
        if self.peek() == "[":
            self._take()
            degree = self.sum()
            self._expect("]")
        return _raise(self._braced(), _divide(Fraction(1), degree))


def _both(x: Value, y: Value) -> tuple[Value, Value]:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        if max(x.numerator.bit_length(), y.numerator.bit_length()) > MAX_BITS:
            raise _CannotTellError
        return x, y
    return _float(x), _float(y)


def _add(x: Value, y: Value) -> Value:
    x, y = _both(x, y)
    return x + y


def _multiply(x: Value, y: Value) -> Value:
    x, y = _both(x, y)
    return x * y


def _divide(x: Value, y: Value) -> Value:
    x, y = _both(x, y)
    return x / y


def _factorial(value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 500:
        raise _CannotTellError
    return Fraction(factorial(int(value)))


def _raise(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * bits > MAX_BITS:
                raise _CannotTellError
            if base == 0 and exponent <= 0:
                raise _CannotTellError
            return base ** int(exponent)
        if exponent == Fraction(1, 2) and base >= 0:
            top, bottom = isqrt(base.numerator), isqrt(base.denominator)
            if top * top == base.numerator and bottom * bottom == base.denominator:
                return Fraction(top, bottom)
    x, y = _float(base), _float(exponent)
    if x == 0 or abs(_context.log(abs(x), 2) * abs(y)) > MAX_BITS:
        raise _CannotTellError
    result = _context.power(x, y)
    return result
