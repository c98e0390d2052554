"""What pydantic finds wrong, told to a person: the field, what it takes, what was there, a mend.

All mistakes of a configuration are told at once. Every field has a type, a default and a meaning
(`rollmill config` prints them), and those are what a mistake in it is explained with.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rollmill.config.describe import default_text, meaning_text, type_text
from rollmill.config.fields import deepest_field, section_of, walk_fields
from rollmill.errors import ConfigError

_NAMED_FIELD = re.compile(r"((?:\w+\.)*\w+): (?=\S)")
"""How our own validators begin a message when they know the field: `rollout.batch_size: …`."""
_MAX_FOUND = 200


@dataclass(frozen=True)
class Mistake:
    """One mistake, in the parts of a `ConfigError`."""

    what: str
    place: str
    expected: str | None = None
    found: str | None = None
    fix: str | None = None

    def on_one_line(self) -> str:
        """As an item of a list of several."""
        expected = f"; expected {self.expected}" if self.expected else ""
        found = f"; found {self.found}" if self.found else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"  - {self.place}: {self.what}{expected}{found}{fix}"


def as_config_error(error: ValidationError, root: type[BaseModel], where: str) -> ConfigError:
    """One error with every mistake; `where` names the file they are in."""
    mistakes = _mistakes(error, root)
    if len(mistakes) == 1:
        only = mistakes[0]
        return ConfigError(
            only.what,
            where=f"{only.place} in {where}" if only.place else where,
            expected=only.expected,
            found=only.found,
            fix=only.fix,
        )
    lines = [mistake.on_one_line() for mistake in mistakes]
    return ConfigError(
        f"{len(mistakes)} mistakes in the configuration:\n" + "\n".join(lines),
        where=where,
        fix="mend them one by one; `rollmill config` prints every field with its meaning",
    )


def _mistakes(error: ValidationError, root: type[BaseModel]) -> list[Mistake]:
    """One for each place: a value that is none of a field's types is one mistake."""
    by_place: dict[str, Mistake] = {}
    for details in error.errors():
        mistake = _mistake(details, root)
        by_place.setdefault(mistake.place, mistake)
    return list(by_place.values())


def _mistake(details: ErrorDetails, root: type[BaseModel]) -> Mistake:
    location = [str(part) for part in details["loc"]]
    kind = details["type"]
    depth, section, info = deepest_field(root, location)
    if kind == "extra_forbidden":
        return _unknown_field(root, location, section)
    if kind == "invalid_key":
        return Mistake(
            "the name of a field is not text",
            ".".join(location[:depth]),
            expected="names of fields",
            found=f"{details['input']!r} as a name",
            fix="inside { } a comma ends a value: 1.0e-5, not 1,0e-5; quote a text with commas",
        )
    if kind == "missing":
        return _missing_field(".".join(location), info)
    if kind == "value_error":
        return _own_message(details["msg"].removeprefix("Value error, "), root, location)
    if info is None:
        return Mistake(details["msg"], ".".join(location), found=_shown(details["input"]))
    return _wrong_value(".".join(_place(location, depth, info)), info, details)


def _place(location: list[str], depth: int, info: FieldInfo) -> list[str]:
    """Steps into a list or mapping stay; names that pydantic gives the types of a union go."""
    has_several_types = "|" in type_text(info).replace(" | null", "")
    return location[:depth] if has_several_types else location


def _unknown_field(
    root: type[BaseModel], location: list[str], section: type[BaseModel] | None
) -> Mistake:
    name = location[-1]
    names = sorted(section.model_fields) if section else []
    fix = (
        _field_of_that_name(root, location)
        or _nearest(name, names)
        or "remove it; `rollmill config` prints every field with its meaning"
    )
    expected = f"one of {', '.join(names)}"
    return Mistake("there is no such field", ".".join(location), expected, repr(name), fix)


def _field_of_that_name(root: type[BaseModel], location: list[str]) -> str | None:
    """A field of exactly that name elsewhere, for users who put it in the wrong section."""
    paths = [path for path, _ in walk_fields(root) if path.rpartition(".")[2] == location[-1]]
    if not paths:
        return None
    same_section = [path for path in paths if path.startswith(".".join(location[:-1]) + ".")]
    return f"there is a field of that name elsewhere: `{(same_section or paths)[0]}`"


def _nearest(text: str, choices: list[str]) -> str | None:
    near = difflib.get_close_matches(text, choices, n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else None


def _missing_field(place: str, info: FieldInfo | None) -> Mistake:
    name = place.rpartition(".")[2]
    expected, example = "a value", "…"
    if info is not None:
        expected = meaning_text(info).rstrip(".")
        if (section := section_of(info.annotation)) is not None:
            example = f"{{{_first_field(section)}: …}}"
    return Mistake(
        "a required field is missing", place, expected, "nothing", f"add `{name}: {example}`"
    )


def _first_field(section: type[BaseModel]) -> str:
    """The field that a section is hardly ever without: the first required one, or the first."""
    required = [name for name, info in section.model_fields.items() if info.is_required()]
    return (required or list(section.model_fields))[0]


def _own_message(message: str, root: type[BaseModel], location: list[str]) -> Mistake:
    """A message of our own validators; when it begins with a field's name, that is the place."""
    named = _NAMED_FIELD.match(message)
    steps = named[1].split(".") if named else []
    for start in (location, []):
        place = [*start, *steps]
        depth, _, info = deepest_field(root, place)
        if depth == len(place) and info is not None:
            return Mistake(message, ".".join(place), fix=_meaning(info))
    return Mistake(message, ".".join(location), fix="`rollmill config` explains every field")


def _meaning(info: FieldInfo) -> str:
    first_sentence = re.split(r"\.(?: |$)", meaning_text(info))[0]
    return f"change it ({first_sentence})"


def _wrong_value(place: str, info: FieldInfo, details: ErrorDetails) -> Mistake:
    section = section_of(info.annotation)
    found = _shown(details["input"])
    if section is not None and details["type"] in ("model_type", "tuple_type"):
        is_list = details["type"] == "tuple_type"
        name, first = place.rpartition(".")[2], _first_field(section)
        given = details["input"] if isinstance(details["input"], str) else "…"
        example = f"{{{first}: {given}}}"
        return Mistake(
            "a list of sections is expected here" if is_list else "a section is expected here",
            place,
            expected="fields such as " + ", ".join(list(section.model_fields)[:4]),
            found=found,
            fix=f"write `{name}: [{example}]`" if is_list else f"write `{name}: {example}`",
        )
    near = _nearest(details["input"], _choices(info)) if isinstance(details["input"], str) else None
    if type_text(info).startswith("list of") and isinstance(details["input"], str):
        near = f"write `{place.rpartition('.')[2]}: [{details['input']}]`"
    default = "it is required" if info.is_required() else f"the default is {default_text(info)}"
    return Mistake(
        "the value cannot be used",
        place,
        expected=type_text(info),
        found=found,
        fix=near or f"{meaning_text(info).rstrip('.')}; {default}",
    )


def _choices(info: FieldInfo) -> list[str]:
    """The words between the bars of a type such as `auto | cpu | cuda`."""
    return [word for word in type_text(info).split(" | ") if word.isidentifier() and word != "null"]


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:_MAX_FOUND]
