"""`rollmill config`: every field with its type, default and meaning."""

from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollmill.config.fields import section_of, walk_fields
from rollmill.config.root import Config


def describe_config() -> str:
    """A commented YAML-like listing of the whole configuration, one line per field."""
    lines: list[str] = []
    for path, info in walk_fields(Config):
        depth = path.count(".")
        indent = "  " * depth
        name = path.rpartition(".")[2]
        meaning = meaning_text(info)
        if section_of(info.annotation) is not None and not _is_optional_value(info):
            lines.append(f"{indent}{name}:  # {meaning}")
        else:
            lines.append(f"{indent}{name}: {default_text(info)}  # [{type_text(info)}] {meaning}")
    return "\n".join(lines)


def _is_optional_value(info: FieldInfo) -> bool:
    return not (
        isinstance(info.annotation, type) or typing.get_origin(info.annotation) in (tuple, list)
    )


def meaning_text(info: FieldInfo) -> str:
    """What the field is for, on one line."""
    return " ".join((info.description or "").split())


def default_text(info: FieldInfo) -> str:
    """The field's default as in YAML."""
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "(required)"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    return str(default)


def type_text(info: FieldInfo) -> str:
    """The field's type with its bounds, in words."""
    bounds = [str(m) for m in info.metadata if _is_bound(m)]
    text = _type_name(info.annotation)
    return text + (
        f", {' '.join(_bound(m) for m in info.metadata if _is_bound(m))}" if bounds else ""
    )


def _is_bound(metadata: Any) -> bool:
    return type(metadata).__name__ in ("Ge", "Gt", "Le", "Lt")


def _bound(metadata: Any) -> str:
    name = type(metadata).__name__.lower()
    symbol = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}[name]
    return f"{symbol} {getattr(metadata, name)}"


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " | ".join(str(a) for a in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in typing.get_args(annotation))
    if origin is tuple:
        return f"list of {_type_name(typing.get_args(annotation)[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(choice.value) for choice in annotation)
    if origin is dict:
        return "mapping"
    if annotation is type(None):
        return "null"
    return getattr(annotation, "__name__", str(annotation))
