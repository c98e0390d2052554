"""Whether two mathematical answers are equal: the one decision that all math-like types share.

The order goes from certain and cheap to general and slow: same text; plain quantities, exactly;
words, as whole words; lists, sets, tuples, intervals and matrices, part by part; expressions, by
the library. `answers_equal` is symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.rewards.mathematics.clean import clean
from rollmill.rewards.mathematics.conventions import (
    canonical,
    choices_or_bases_equal,
    named_tuples,
    option_texts,
    without_extras,
)
from rollmill.rewards.mathematics.latex import has_trigonometry, is_text
from rollmill.rewards.mathematics.numbers import (
    long_integers_equal,
    quantities_equal,
    read_quantity,
)
from rollmill.rewards.mathematics.structure import Many, Node, Scalar, parse
from rollmill.rewards.mathematics.units import find_unit

_GENERIC_UNIT = re.compile(
    r"(.*?\S)\s+(?:(?:square|sq\.?|cubic|cu\.?)\s+)?units?(?:\s*\^\s*\{?[23]\}?)?"
)
_ASSIGNMENT = re.compile(
    r"([a-zA-Z](?:_\{?\w+\}?)?'?(?:\((?:[a-zA-Z,\s]+|[-\d.,\s]+)\))?|[A-Z]{2,4}"
    r"|m?\\angle\s*[A-Z]{1,4}|\\[a-z]+(?:\s[a-zA-Z]|\s*\\[a-z]+)?|\|[A-Z]{2}\|"
    r"|[A-Z]\([^()]+\)|[A-Z]\[[^\[\]]+\]|\\frac\{d[a-zA-Z]?\}\{d[a-zA-Z]\}"
    r"|[a-zA-Z]{3,}(?:\s[a-zA-Z]+){0,4})\s*"
    r"(?:=|\\approx(?![a-zA-Z]))\s*([^=<>]+)"
)
_TRAILING_UNIT = re.compile(
    r"^(.*?(?:[)}\]\d]\s|\\pi\s|[a-zA-Z]\s(?=\s*[a-zA-Z]{2})))\s*"
    r"((?:[a-zA-Z]|°|/|\s|\^\s*\{?-?\d\}?)+)$",
    re.DOTALL,
)
_LEADING_APPROX = re.compile(
    r"^(?:(?:\\approx(?![a-zA-Z])|(?:about|around|approximately|roughly)(?=\s+\S*\d)|~|\\sim(?![a-zA-Z]))\s*)+",
    re.IGNORECASE,
)
_HAS_RELATION = re.compile(r"[=<>]|\\(?:leq|geq|neq|lt|gt|in)(?![a-zA-Z])")


def answers_equal(a: str, b: str) -> bool:
    """Whether two answers, as people or models write them, are the same."""
    left, right = clean(a), clean(b)
    if not left or not right:
        return False
    return _equal(left, right)


def _equal(left: str, right: str) -> bool:
    if left == right or canonical(left) == canonical(right):
        return True
    verdict = _quantities(left, right)
    if verdict is not None:
        return verdict
    verdict = choices_or_bases_equal(left, right)
    if verdict is not None:
        return verdict
    texts = option_texts(left, right)
    if texts is not None:
        return _equal(*texts)
    named = named_tuples(left, right)
    if named is not None:
        return _nodes_equal(*named)
    extras = without_extras(left, right)
    if extras != (left, right):
        return _equal(*extras)
    first, second = parse(left), parse(right)
    if isinstance(first, Many) or isinstance(second, Many):
        if _nodes_equal(first, second):
            return True
        sides = [
            node.text if isinstance(node, Scalar) else text
            for node, text in ((first, left), (second, right))
        ]
        return _may_be_interval(first, second) and _by_library(*sides)
    return _scalars_equal(first.text, second.text)


def _may_be_interval(left: Node, right: Node) -> bool:
    """Whether one side is a union, or an interval against an inequality: the library's work."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Many) and one.kind == "union":
            return True
        if isinstance(one, Many) and one.kind == "tuple" and isinstance(other, Scalar):
            return len(one.items) == 2 and _HAS_RELATION.search(other.text) is not None
    return False


def _quantities(left: str, right: str) -> bool | None:
    """The exact verdict on two plain quantities; None when one is something else."""
    first, second = read_quantity(left), read_quantity(right)
    if first is not None and second is not None:
        return quantities_equal(first, second)
    if (first is None and second is None) or max(len(left), len(right)) > 2000:
        return long_integers_equal(left, right)
    return None


def _scalars_equal(left: str, right: str) -> bool:
    """Two expressions, equations or texts without list structure."""
    bare = _LEADING_APPROX.sub("", left), _LEADING_APPROX.sub("", right)
    if bare != (left, right):
        return _equal(*bare)
    first, second = _ASSIGNMENT.fullmatch(left), _ASSIGNMENT.fullmatch(right)
    if (first is None) != (second is None):
        if first is not None and _HAS_RELATION.search(right) is None:
            return _equal(first.group(2).strip(), right)
        if second is not None and _HAS_RELATION.search(left) is None:
            return _equal(left, second.group(2).strip())
    elif first is not None and second is not None:
        if first.group(1) == second.group(1):
            return _equal(first.group(2).strip(), second.group(2).strip())
        if _is_name(first.group(2)) is _is_name(second.group(2)) is False:
            return _by_library(left, right)
    chained = _unchained(left), _unchained(right)
    if chained != (left, right):
        return _equal(*chained)
    if is_text(left) or is_text(right):
        return _with_units(left, right)
    return _by_library(left, right) or _with_units(left, right)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\s*[a-zA-Z]\s*", text) is not None


def _unchained(text: str) -> str:
    """`x = 2 + 3 = 5` as `x = 5`; a true `2 + 3 = 5` as `5`; anything else as it is."""
    parts = [part.strip() for part in re.split(r"(?<![<>!\\])=(?!=)", text)]
    if len(parts) < 2 or not all(parts):
        return text
    if len(parts) > 2 and re.fullmatch(r"[a-zA-Z](?:_\{?\w+\}?)?|[a-zA-Z]\([a-zA-Z]\)", parts[0]):
        return f"{parts[0]} = {parts[-1]}"
    if is_text(text):
        return text
    from rollmill.rewards.mathematics.symbolic import true_value

    return true_value(text) or text


def _with_units(left: str, right: str) -> bool:
    """Expressions with a unit behind them: `5\\sqrt{2} cm`."""
    first, first_unit = _split_unit(left)
    second, second_unit = _split_unit(right)
    if (first, second) == (left, right):
        return False
    if first_unit is not None and second_unit is not None and first_unit != second_unit:
        return False
    return _equal(first, second)


def _split_unit(text: str) -> tuple[str, object]:
    generic = _GENERIC_UNIT.fullmatch(text)
    if generic is not None:
        return generic.group(1), None
    match = _TRAILING_UNIT.match(text)
    if match is None:
        if text.endswith("°") and not has_trigonometry(text):
            return text[:-1].strip(), find_unit("°")
        return text, None
    unit = find_unit(match.group(2))
    return (match.group(1).strip(), unit) if unit is not None else (text, None)


def _by_library(left: str, right: str) -> bool:
    if is_text(left) or is_text(right):
        return False
    from rollmill.rewards.mathematics.evaluate import values_equal

    verdict = values_equal(left, right)
    if verdict is not None:
        return verdict
    from rollmill.rewards.mathematics.symbolic import expressions_equal

    return expressions_equal(left, right)


def _nodes_equal(left: Node, right: Node) -> bool:
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        return _equal(left.text, right.text)
    if isinstance(left, Scalar) or isinstance(right, Scalar):
        return _one_in_many(left, right)
    kinds = {left.kind, right.kind}
    if kinds == {"tuple"}:
        if left.kind == right.kind and not _same_brackets(left, right):
            return False
        return _in_order(left.items, right.items)
    if kinds in ({"list"}, {"set"}, {"list", "set"}, {"union"}):
        return _in_any_order(left, right)
    if kinds == {"list", "tuple"} or kinds == {"matrix"}:
        return _in_order(left.items, right.items)
    if kinds == {"matrix", "tuple"}:
        matrix, entries = (left, right) if left.kind == "matrix" else (right, left)
        rows = [_row(item) for item in entries.items]
        if all(row is not None for row in rows):  # [[1,2],[3,4]]
            return _in_order(matrix.items, [row for row in rows if row is not None])
        flat = _vector(matrix)
        if entries.opening + entries.closing not in ("()", "[]"):
            return False  # a half-open interval
        return flat is not None and _in_order(flat, entries.items)
    return False


def _one_in_many(left: Node, right: Node) -> bool:
    """A scalar equals a set or list of one, and `{}` the empty set."""
    many = left if isinstance(left, Many) else right
    other = right if many is left else left
    return (
        isinstance(many, Many)
        and many.kind in ("set", "list", "matrix")
        and len(many.items) == 1
        and _nodes_equal(many.items[0], other)
    )


def _same_brackets(left: Many, right: Many) -> bool:
    """Brackets matter for two entries (intervals); longer ones are lists in any brackets."""
    if len(left.items) > 2:
        return True
    return (left.opening, left.closing) == (right.opening, right.closing)


def _row(node: Node) -> Many | None:
    """`[1,2]` as a row of a matrix."""
    is_row = isinstance(node, Many) and node.kind == "tuple"
    return Many("tuple", node.items, "(", ")") if is_row and isinstance(node, Many) else None


def _vector(matrix: Many) -> Sequence[Node] | None:
    """The entries of a matrix that is one row or one column."""
    rows = [row.items for row in matrix.items if isinstance(row, Many)]
    if len(rows) == 1:
        return rows[0]
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else None


def _in_order(left: Sequence[Node], right: Sequence[Node]) -> bool:
    return len(left) == len(right) and all(
        _nodes_equal(a, b) for a, b in zip(left, right, strict=True)
    )


def _in_any_order(left: Many, right: Many) -> bool:
    """One-to-one matching. Equality is transitive, so taking the first match is enough."""
    first, second = list(left.items), list(right.items)
    if "set" in (left.kind, right.kind):
        first, second = _distinct(first), _distinct(second)
    if len(first) != len(second):
        return False
    if _names(first) != _names(second) and len(_names(first) | _names(second)) > 1:
        return _in_order(first, second)  # x = 1, y = 2 against 1, 2
    for item in first:
        match = next((k for k, other in enumerate(second) if _nodes_equal(item, other)), None)
        if match is None:
            return False
        del second[match]
    return True


def _names(items: Sequence[Node]) -> set[str]:
    found = (_ASSIGNMENT.fullmatch(item.text) for item in items if isinstance(item, Scalar))
    return {match.group(1) for match in found if match is not None}


def _distinct(items: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(_nodes_equal(item, other) for other in kept):
            kept.append(item)
    return kept
