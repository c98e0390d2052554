"""Expressions, equations and sets, by the library: math-verify's parser and its comparison.

Numbers and expressions are compared here by exact arithmetic and by evaluating the difference to
40 digits at fixed points, which is quick, exact for rationals and needs no simplification that may
explode; what that cannot decide (relations, infinite sets) goes to math-verify's `verify`.

Nothing here is safe from answers such as `9^{9^{9^9}}`: the worker's deadline is.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.relational import Relational

from rollmill.rewards.mathematics.latex import to_latex

logging.getLogger("math_verify").setLevel(logging.ERROR)

_CONVERSION = ConversionConfig(lowercase_symbols=False)
DIGITS = 40
_TOLERANCE = sympy.Rational(1, 10**25)
_POINTS = tuple(
    tuple(sympy.Rational(top, 97) for top in tops)
    for tops in (
        (131, 173, 59, 311, 239),
        (43, 367, 211, 29, 149),
        (-71, 227, -317, 101, -53),
        (-283, -163, 83, -191, 127),
    )
)
MAX_LATEX_CHARS = 2000


@lru_cache(maxsize=2048)
def parse_expression(text: str) -> Any:
    """The library's object for a cleaned answer; None when it cannot be parsed as a whole.

    Policy: whatever the parser raises (save MemoryError) means "not mathematics".
    """
    if not text or len(text) > MAX_LATEX_CHARS:
        return None
    try:
        return latex2sympy(
            to_latex(text),
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  (policy above)
        return None


def expressions_equal(a: str, b: str) -> bool:
    """Whether two cleaned answers are the same expression, equation, inequality or set."""
    left, right = parse_expression(a), parse_expression(b)
    if left is None or right is None:
        return False
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        sides = (left.lhs, left.rhs, right.lhs, right.rhs)
        if all(map(_is_number_like, sides)):
            return _equations_equal(left, right)
        return _library_equal(left, right)  # of tuples, sets, matrices
    if isinstance(left, sympy.Eq) != isinstance(right, sympy.Eq):
        return False
    if _is_number_like(left) and _is_number_like(right):
        verdict = _values_equal(left, right)
        if verdict is not None:
            return verdict
    return _library_equal(left, right)


def _is_number_like(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixBase)


def _equations_equal(left: Any, right: Any) -> bool:
    """Same up to a constant factor: `2x = 4` and `x = 2`, `y = x` and `x - y = 0`."""
    first, second = left.lhs - left.rhs, right.lhs - right.rhs
    symbols = _symbols(first) | _symbols(second)
    if not symbols:
        return bool(left == right)
    factor = None
    for point in _POINTS:
        x, y = _evaluate(first, symbols, point), _evaluate(second, symbols, point)
        if x is None or y is None:
            continue
        if abs(y) <= _TOLERANCE or abs(x) <= _TOLERANCE:
            if abs(x - y) > _TOLERANCE:
                return False
            continue
        if factor is None:
            factor = x / y
        elif abs(x / y - factor) > _TOLERANCE * abs(factor):
            return False
    return factor is not None or _library_equal(left, right)


def _values_equal(left: Any, right: Any) -> bool | None:
    """Equality of numbers and expressions; None when evaluation cannot tell."""
    symbols = _symbols(left) | _symbols(right)
    if left == right and symbols:
        return True
    if not symbols:
        left, right = left.doit(), right.doit()
        if left.has(sympy.zoo, sympy.nan) or right.has(sympy.zoo, sympy.nan):
            return False  # undefined, as 1/0: equal to nothing but the same text
        if left.is_Rational and right.is_Rational:
            return bool(left == right)
        if left.is_infinite or right.is_infinite:
            return bool(left == right)
    compared = 0
    for point in _POINTS if symbols else _POINTS[:1]:
        x, y = _evaluate(left, symbols, point), _evaluate(right, symbols, point)
        if x is None or y is None or (symbols and not (x.is_real and y.is_real)):
            continue
        if abs(x - y) > _TOLERANCE * max(sympy.Integer(1), abs(x), abs(y)):
            return False
        compared += 1
    return True if compared else None


def _symbols(expression: Any) -> frozenset[str]:
    return frozenset(symbol.name for symbol in expression.free_symbols) - {"i"}


def _evaluate(expression: Any, symbols: frozenset[str], point: tuple[Any, ...]) -> Any:
    """The value at a point, or None when it has none. The symbol `i` is the imaginary unit."""
    if len(symbols) > len(point):
        point = point + tuple(
            sympy.Rational(7 * k + 11, 13) for k in range(len(symbols) - len(point))
        )
    values = dict(zip(sorted(symbols), point, strict=False))
    substitutions = {
        symbol: sympy.I if symbol.name == "i" else values[symbol.name]
        for symbol in expression.free_symbols
    }
    try:
        value = sympy.N(expression.subs(substitutions).doit(), DIGITS)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None
    is_number = value.is_number and value.is_finite and not value.free_symbols
    return sympy.expand_complex(value) if is_number else None


def _library_equal(left: Any, right: Any) -> bool:
    is_expression = _is_number_like(left) and _is_number_like(right)
    if is_expression and not (left.free_symbols or right.free_symbols):
        return False  # numbers are decided exactly, never by the library's rounding
    return any(
        verify(first, second, timeout_seconds=None, allow_set_relation_comp=True)
        for first, second in ((left, right), (right, left))
    )


def true_value(text: str) -> str | None:
    """The right side of a true equation between numbers (`2 + 3 = 5`), as text; else None."""
    left, _, right = text.rpartition("=")
    parts = [parse_expression(part.strip()) for part in (*left.split("="), right)]
    if any(part is None or not _is_number_like(part) or _symbols(part) for part in parts):
        return None
    last = parts[-1]
    return right.strip() if all(_values_equal(part, last) for part in parts[:-1]) else None


def is_relation(text: str) -> bool:
    """Whether a cleaned answer parses as an equation or inequality."""
    return isinstance(parse_expression(text), Relational)
