"""Taking an answer apart: lists, sets, tuples, intervals, unions, matrices. Pure text to tree."""

from __future__ import annotations

import re
from dataclasses import dataclass

_AND_OR = re.compile(r"(?:,\s*)?(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
_OR = re.compile(r"(?:,\s*)?(?<![a-zA-Z\\])or(?![a-zA-Z])")
_BELOW_OR_ABOVE = re.compile(r"([a-zA-Z])\s*(<|>|\\leq|\\geq)\s*([^<>=]+)")
_BETWEEN = re.compile(r"([^<>=]+?)\s*(<|\\leq)\s*([a-zA-Z])\s*(<|\\leq)\s*([^<>=]+)")
_OUTWARD = re.compile(r"([\[\]])([^\[\]()]+)([\[\]])")
_TIGHT_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL
)
_LINES = re.compile(
    r"(?:\\\{\s*)?\\begin\{([rd]?cases|aligned|align\*?|gathered|split)\}(.*)\\end\{\1\}", re.DOTALL
)
_CONDITION = re.compile(r"^(?:if|for|when)(?![a-zA-Z])|,$")
_BRACKETED_MATRIX = re.compile(
    r"[\[(]\s*(\\begin\{(matrix|array)\}.*\\end\{\2\})\s*[\])]", re.DOTALL
)
_SCALED_MATRIX = re.compile(
    r"([^\\=<>&,;\[\]]*|[^=<>&,;\[\]]*?\})\s*(?:\\cdot|\\times|\*)?\s*(\\begin\{[pb]?matrix\}.*)",
    re.DOTALL,
)
_UNION = re.compile(r"\\cup(?![a-zA-Z])|(?<=[)\]}])\s*U\s*(?=[(\[{\\])")
_MEMBER = re.compile(r"^[a-zA-Z](?:_\{?\w+\}?)?\s*\\in(?![a-zA-Z])\s*")
_OPENING = {"(": ")", "[": "]"}
_SET_BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\mid(?![a-zA-Z])|\||:)\s*([^|]*)\\\}")
MAX_ITEMS = 256


@dataclass(frozen=True, slots=True)
class Scalar:
    """One expression, equation or text."""

    text: str


@dataclass(frozen=True, slots=True)
class Many:
    """Several answers.

    Attributes:
        kind: `list` (no brackets, any order), `set` (any order, once each), `tuple` (in order),
            `union` (sets in any order), `matrix` (items are rows).
        items: the parts.
        opening: `(` or `[` of a tuple.
        closing: `)` or `]` of a tuple.
    """

    kind: str
    items: tuple[Node, ...]
    opening: str = ""
    closing: str = ""


Node = Scalar | Many


def parse(text: str) -> Node:
    """The tree of a cleaned text."""
    return _parse(_MEMBER.sub("", _prepared(text)), 0)


def _prepared(text: str) -> str:
    built = _SET_BUILDER.fullmatch(text)
    if built is not None:
        text = built.group(1)
    text = _OUTWARD.sub(_french_interval, text)
    text = _as_union(text) or text
    text = _AND_OR.sub(", ", text)
    if "\\begin" not in text:
        text = re.sub(r"\s&\s", ", ", text)
    if ", " in text:
        text = _TIGHT_THOUSANDS.sub("", text)
    return text


def _parse(text: str, depth: int) -> Node:
    text = text.strip()
    if depth > 8:
        return Scalar(text)
    lines = _LINES.fullmatch(text)
    if lines is not None:
        return _system(lines.group(2), depth)
    bracketed = _BRACKETED_MATRIX.fullmatch(text)
    if bracketed is not None:
        text = bracketed.group(1)
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None and matrix.group(1)[0] not in "vV":
        return _matrix(matrix.group(2), depth)
    scaled = _SCALED_MATRIX.fullmatch(text)
    if scaled is not None and (matrix := _MATRIX.fullmatch(scaled.group(2))) is not None:
        return _matrix(matrix.group(2), depth, factor=scaled.group(1).strip())
    parts = _split(text, _UNION)
    if len(parts) > 1 and all(parts):
        return Many("union", tuple(_parse(part, depth + 1) for part in parts))
    items = split_commas(text)
    if len(items) > 1:
        return Many("list", _nodes(items, depth))
    return _bracketed(text, depth) or _plus_minus(text) or Scalar(text)


def _nodes(items: list[str], depth: int) -> tuple[Node, ...]:
    """Parsed items; `±` in an item gives two."""
    nodes: list[Node] = []
    for item in items:
        node = _parse(item, depth + 1)
        nodes += node.items if isinstance(node, Many) and node.kind == "list" else [node]
    return tuple(nodes)


def _bracketed(text: str, depth: int) -> Node | None:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner = text[2:-2]
        if not _is_balanced(inner):
            return None
        if not inner.strip():
            return Scalar(r"\emptyset")
        if re.search(r"\\mid|(?<!\\)\||:", inner):
            return None  # set-builder notation
        return Many("set", _nodes(split_commas(inner), depth))
    if text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        items = split_commas(text[1:-1])
        if len(items) > 1:
            return Many("set", _nodes(items, depth))
        return _parse(text[1:-1], depth + 1) if text[1:-1].strip() else None
    if text[:1] in _OPENING and text[-1:] in (")", "]") and _is_balanced(text[1:-1]):
        items = split_commas(text[1:-1])
        if len(items) > 1:
            nodes = tuple(_parse(item, depth + 1) for item in items)
            return Many("tuple", nodes, text[0], text[-1])
    return None


def _plus_minus(text: str) -> Node | None:
    if r"\pm" not in text and r"\mp" not in text:
        return None
    upper = text.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return Many("list", tuple(Scalar(_without_plus(sign)) for sign in (upper, lower)))


def _without_plus(text: str) -> str:
    return re.sub(r"(^|=)\s*\+\s*", r"\1", text)


def _matrix(body: str, depth: int, factor: str = "") -> Node:
    if factor:
        factor = f"({'-1' if factor == '-' else factor})"
        return _multiplied(_matrix(body, depth), factor)
    body = body.replace(r"\hline", "").strip().removesuffix("\\\\")
    return Many(
        "matrix",
        tuple(
            Many("tuple", tuple(_parse(cell, depth + 1) for cell in row.split("&")), "(", ")")
            for row in body.split("\\\\")
        ),
    )


def _system(body: str, depth: int) -> Node:
    """The lines of `cases` or `aligned`, in any order; the cells of a line (a value and its
    condition) in theirs."""
    nodes: list[Node] = []
    for line in re.split(r"\\\\", re.sub(r"&\s*(?=[=<>])", "", body)):
        cells = [_CONDITION.sub("", cell.strip()).strip() for cell in line.split("&")]
        cells = [cell for cell in cells if cell]
        parts = tuple(_parse(cell, depth + 1) for cell in cells)
        nodes += parts if len(parts) < 2 else [Many("tuple", parts, "(", ")")]
    return Many("list", tuple(nodes))


def _multiplied(node: Node, factor: str) -> Node:
    if isinstance(node, Scalar):
        return Scalar(rf"{factor}\cdot ({node.text})")
    items = tuple(_multiplied(item, factor) for item in node.items)
    return Many(node.kind, items, node.opening, node.closing)


def _french_interval(match: re.Match[str]) -> str:
    """`]1,2[` as `(1,2)`: a bracket that looks outward is open."""
    left, inner, right = match.groups()
    if (left, right) == ("[", "]") or len(split_commas(inner)) != 2:
        return match.group()
    return f"{'(' if left == ']' else '['}{inner}{')' if right == '[' else ']'}"


def _as_union(text: str) -> str | None:
    """`x<-2 or x>2` as a union of intervals; None for anything else."""
    parts = _OR.split(text)
    intervals = [_as_interval(part.strip()) for part in parts]
    if len(parts) < 2 or any(one is None for one in intervals):
        return None
    if len({one[0] for one in intervals if one is not None}) > 1:
        return None
    return r"\cup ".join(one[1] for one in intervals if one is not None)


def _as_interval(text: str) -> tuple[str, str] | None:
    """The variable of an inequality, and its interval."""
    match = _BELOW_OR_ABOVE.fullmatch(text)
    if match is not None:
        name, relation, bound = match[1], match[2], match[3].strip()
        if relation in ("<", r"\leq"):
            return name, rf"(-\infty,{bound}{')' if relation == '<' else ']'}"
        return name, rf"{'(' if relation == '>' else '['}{bound},\infty)"
    match = _BETWEEN.fullmatch(text)
    if match is None:
        return None
    opening, closing = "(" if match[2] == "<" else "[", ")" if match[4] == "<" else "]"
    return match[3], f"{opening}{match[1]},{match[5].strip()}{closing}"


def split_commas(text: str) -> list[str]:
    """The parts between commas (or semicolons) outside all brackets."""
    return _split(text, re.compile(r"[,;]"))


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    if separator.search(text) is None:
        return [text.strip()]
    depths = _depths(text)
    parts: list[str] = []
    start = 0
    for match in separator.finditer(text):
        if depths[match.start()] == 0 and len(parts) < MAX_ITEMS:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return parts


def _depths(text: str) -> list[int]:
    """Bracket depth at each character. Half-open intervals close any round or square bracket."""
    depths: list[int] = []
    depth = 0
    for character in text:
        if character in ")]}":
            depth -= 1
        depths.append(depth)
        if character in "([{":
            depth += 1
    return depths


def _is_balanced(inner: str) -> bool:
    """Whether what stands between the first and last bracket closes only what it opened."""
    depths = _depths(inner)
    final = depths[-1] if depths else 0
    if inner and inner[-1] in "([{":
        final += 1
    return final == 0 and min(depths, default=0) >= 0
