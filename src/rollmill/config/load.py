"""From a YAML file and `section.field=value` overrides to a validated `Config`.

Every mistake ends as one `ConfigError` that names the field, what was expected, what was found
and, for a misspelled name, the nearest right one. All mistakes are reported together.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.config.root import Config
from rollmill.errors import ConfigError


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read `path`, apply the overrides in order and validate.

    Args:
        path: a YAML file with one mapping per section.
        overrides: `section.field=value`, the value read as YAML (`trainer.optimizer.lr=1e-5`).

    Raises:
        ConfigError: with every mistake found.
    """
    values = _read_yaml(path)
    for override in overrides:
        apply_override(values, override)
    return parse_config(values, where=str(path))


def parse_config(values: Mapping[str, Any], *, where: str = "configuration") -> Config:
    """Validate plain values; `where` names their origin in the error."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _as_config_error(error, Config, where) from None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `section.field=value` in nested plain values, in place.

    A step that is a number indexes a list (`eval.datasets.0.sampling.temperature=1`).

    Raises:
        ConfigError: not of that form, the value is no YAML, or the path leads through a value.
    """
    key, equals, text = override.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        raise ConfigError(
            "an override cannot be read",
            where=override,
            expected="section.field=value, for example trainer.optimizer.lr=1e-5",
        )
    try:
        value = _yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of an override is not YAML: {_one_line(error)}", where=override
        ) from None
    node: Any = values
    for depth, step in enumerate(steps[:-1]):
        node = _descend(node, step, ".".join(steps[: depth + 1]), override)
    if isinstance(node, list):
        node[_list_index(node, steps[-1], key, override)] = value
    elif isinstance(node, dict):
        node[steps[-1]] = value
    else:
        raise _leads_through_value(".".join(steps[:-1]), node, override)


def to_plain(config: BaseModel) -> dict[str, Any]:
    """The whole configuration, defaults included, as values that YAML and JSON can hold."""
    plain: dict[str, Any] = config.model_dump(mode="json")
    return plain


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "the configuration file does not exist",
            where=str(path),
            fix=_nearest_file(path) or "check the path; examples/ has working ones",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration file cannot be read: {error}", where=str(path)
        ) from None
    try:
        values = _yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {_one_line(error)}", where=str(path)) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            "the configuration file must hold sections",
            where=str(path),
            expected="a mapping such as `model: {path: …}`",
            found=type(values).__name__,
        )
    return values


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two mends: `1e-5` is a number, and a key given twice is an error."""


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, yaml.Node] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (str, int, float, bool)) and key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is given twice", key_node.start_mark
            )
        if isinstance(key, (str, int, float, bool)):
            seen[key] = key_node
    loader.flatten_mapping(node)
    return {
        loader.construct_object(k, deep=True): loader.construct_object(v, deep=True)
        for k, v in node.value
    }


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _construct_scalar_string(loader: _Loader, node: yaml.ScalarNode) -> Any:
    text = loader.construct_scalar(node)
    if node.style is None and text[:1] in "+-.0123456789" and "e" in text.lower():
        try:
            return float(text)
        except ValueError:
            return text
    return text


_Loader.add_constructor("tag:yaml.org,2002:str", _construct_scalar_string)


def _yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _nearest_file(path: Path) -> str | None:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = [p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {folder / near[0]}?" if near else None


def _descend(node: Any, step: str, path: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, step, path, override)]
    if not isinstance(node, dict):
        raise _leads_through_value(path.rpartition(".")[0], node, override)
    if node.get(step) is None:
        node[step] = {}
    return node[step]


def _list_index(node: list[Any], step: str, path: str, override: str) -> int:
    if step.isdigit() and int(step) < len(node):
        return int(step)
    raise ConfigError(
        "an override points into a list",
        where=override,
        expected=f"at {path}: a number from 0 to {len(node) - 1}",
        found=step,
    )


def _leads_through_value(path: str, node: Any, override: str) -> ConfigError:
    return ConfigError(
        "an override leads through a value that has no fields",
        where=override,
        expected=f"{path} to be a section",
        found=repr(node),
    )


def _as_config_error(error: ValidationError, root: type[BaseModel], where: str) -> ConfigError:
    problems = [_describe(details, root) for details in error.errors()]
    if len(problems) == 1:
        what, place, expected, found, fix = problems[0]
        return ConfigError(
            what, where=f"{place} in {where}", expected=expected, found=found, fix=fix
        )
    lines = [_render(problem) for problem in problems]
    return ConfigError(
        f"{len(problems)} mistakes in the configuration:\n" + "\n".join(lines), where=where
    )


Problem = tuple[str, str, str | None, str | None, str | None]


def _render(problem: Problem) -> str:
    what, place, expected, found, fix = problem
    tail = [
        f"expected {expected}" if expected else "",
        f"found {found}" if found else "",
        fix or "",
    ]
    return f"  - {place}: {what}" + "".join(f"; {part}" for part in tail if part)


def _describe(details: ErrorDetails, root: type[BaseModel]) -> Problem:
    location = [str(part) for part in details["loc"]]
    place = ".".join(location) or "the whole"
    kind = details["type"]
    if kind == "extra_forbidden":
        names = _known_names(root, location[:-1])
        near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
        fix = f"did you mean `{near[0]}`?" if near else _elsewhere(root, location[-1])
        return ("there is no such field", place, f"one of {', '.join(sorted(names))}", None, fix)
    if kind == "missing":
        return ("a required field is missing", place, "a value", "nothing", None)
    if kind == "value_error":
        message = details["msg"].removeprefix("Value error, ")
        return (message, place, None, None, None)
    found = repr(details["input"])
    expected = details["msg"].removeprefix("Input should be ").removeprefix("Value should be ")
    return ("the value cannot be used", place, expected, found[:200], None)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `X | None` or `tuple[X, ...]`, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list):
        for argument in typing.get_args(annotation):
            if (found := section_of(argument)) is not None:
                return found
    return None


def _known_names(root: type[BaseModel], location: list[str]) -> list[str]:
    node: type[BaseModel] | None = root
    for step in location:
        if node is None or step.isdigit():
            continue
        info = node.model_fields.get(step)
        node = section_of(info.annotation) if info else None
    return list(node.model_fields) if node else []


def _elsewhere(root: type[BaseModel], name: str) -> str | None:
    """A field of that name in another section, for users who put it in the wrong one."""
    for path, _ in walk_fields(root):
        if path.rpartition(".")[2] == name:
            return f"there is a field of that name elsewhere: `{path}`"
    return None


def walk_fields(section: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Every leaf and section of the configuration: (dotted path, pydantic FieldInfo)."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, info
        nested = section_of(info.annotation)
        if nested is not None:
            is_list = typing.get_origin(info.annotation) in (tuple, list)
            yield from walk_fields(nested, f"{path}.0." if is_list else f"{path}.")


def load_embedded(overrides: Iterable[str]) -> EmbeddedEngineConfig:
    """The embedded engine's settings from `field=value` texts, for `rollmill serve`.

    Raises:
        ConfigError: with every mistake found.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    try:
        return EmbeddedEngineConfig.model_validate(values)
    except ValidationError as error:
        raise _as_config_error(error, EmbeddedEngineConfig, "engine.embedded") from None
