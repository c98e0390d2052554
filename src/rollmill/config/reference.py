"""`rollmill config --markdown`: the same fields as a page of tables, one section of it each.

docs/configuration.md is this text; a test holds them together.
"""

from __future__ import annotations

import inspect
import typing

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollmill.config.describe import default_text, meaning_text, type_text
from rollmill.config.fields import section_of
from rollmill.config.root import Config

INTRODUCTION = """\
# Configuration

A run is a YAML file with the sections below; only `model.path` and `data` are required. Every
field can be set on the command line too, `rollmill train mine.yaml trainer.optimizer.lr=2e-6`.
Unknown fields are errors, with the nearest name. This page is what `rollmill config --markdown`
prints.
"""


def config_reference() -> str:
    """The whole configuration as Markdown: a heading and a table per section, in file order."""
    parts = [INTRODUCTION]
    for path, section in _sections("", Config):
        title = f"## `{path}`" if path else "## Sections"
        parts.append(f"{title}\n\n{_introduction(section)}{_table(section)}")
    return "\n".join(parts)


def _sections(path: str, section: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """Each section once, with the path it has first."""
    found = [(path, section)]
    for name, info in section.model_fields.items():
        nested = section_of(info.annotation)
        if nested is None:
            continue
        mark = "[]" if typing.get_origin(info.annotation) in (tuple, list) else ""
        below = _sections(f"{path}.{name}{mark}".lstrip("."), nested)
        known = [each for _, each in found]
        found += [(where, each) for where, each in below if each not in known]
    return found


def _introduction(section: type[BaseModel]) -> str:
    text = inspect.cleandoc(section.__doc__ or "")
    return f"{text}\n\n" if text else ""


def _table(section: type[BaseModel]) -> str:
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [_row(name, info) for name, info in section.model_fields.items()]
    return "\n".join(rows) + "\n"


def _row(name: str, info: FieldInfo) -> str:
    nested = section_of(info.annotation)
    kind = _cell(type_text(info)) if nested is None else f"section{_several_or_none(info)}"
    default = "its fields' own" if _is_section_value(info) else f"`{default_text(info)}`"
    return f"| `{name}` | {kind} | {_cell(default)} | {_cell(meaning_text(info))} |"


def _several_or_none(info: FieldInfo) -> str:
    """How a section may stand there other than once."""
    if typing.get_origin(info.annotation) in (tuple, list):
        return "s, a list of them"
    return " or null" if type(None) in typing.get_args(info.annotation) else ""


def _is_section_value(info: FieldInfo) -> bool:
    return isinstance(info.default, BaseModel)


def _cell(text: str) -> str:
    """Text that stays inside its cell."""
    return text.replace("|", "\\|")
