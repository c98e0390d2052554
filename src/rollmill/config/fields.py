"""The fields of the configuration by name: what its description and its errors are made of."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def section_of(annotation: object) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `X | None` or `tuple[X, ...]`, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list):
        for argument in typing.get_args(annotation):
            if (found := section_of(argument)) is not None:
                return found
    return None


def walk_fields(section: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, FieldInfo]]:
    """Every leaf and section of the configuration: (dotted path, pydantic's description of it)."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, info
        nested = section_of(info.annotation)
        if nested is not None:
            is_list = typing.get_origin(info.annotation) in (tuple, list)
            yield from walk_fields(nested, f"{path}.0." if is_list else f"{path}.")


def deepest_field(
    root: type[BaseModel], location: Sequence[str]
) -> tuple[int, type[BaseModel] | None, FieldInfo | None]:
    """Follow `location` as far as it names fields; numbers of lists are stepped over.

    Returns:
        how many of its steps name something, the section that the next step would be a field of
        (None inside a plain value), and the last field named.
    """
    section: type[BaseModel] | None = root
    info: FieldInfo | None = None
    depth = 0
    for depth, step in enumerate(location):
        if step.isdigit() and info is not None and section is not None:
            continue
        if section is None or step not in section.model_fields:
            return depth, section, info
        info = section.model_fields[step]
        section = section_of(info.annotation)
    return (depth + 1 if location else 0), section, info
