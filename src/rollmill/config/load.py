"""From a YAML file and `section.field=value` overrides to a validated `Config`.

Every mistake ends as one `ConfigError` that names the field, what was expected, what was found
and, for a misspelled name, the nearest right one. All mistakes are reported together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.config.mistakes import as_config_error
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
        raise as_config_error(error, Config, where) from None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `section.field=value` in nested plain values, in place.

    A step that is a number indexes a list (`eval.datasets.0.sampling.temperature=1`).

    Raises:
        ConfigError: not of that form, the value is no YAML, or the path leads through a value.
    """
    key, equals, text = override.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps) or key.startswith("-"):
        raise ConfigError(
            "an override cannot be read",
            where=override,
            expected="section.field=value, for example trainer.optimizer.lr=1e-5",
            fix=_override_fix(override),
        )
    try:
        value = _yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            "the value of an override is not YAML",
            where=override,
            expected="section.field=value, for example trainer.optimizer.lr=1e-5",
            found=_problem(error),
            fix="put the whole in quotes for the shell: 'engine.urls=[\"http://gpu1:30000\"]'",
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


def _override_fix(override: str) -> str:
    if override.startswith("-"):
        return "settings have no dashes: section.field=value; for the command's options see --help"
    return "no spaces around =; `rollmill config` prints every field"


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
            "the configuration file cannot be read",
            where=str(path),
            expected="a YAML file in UTF-8",
            found=_unreadable(error),
            fix="give the file itself" if path.is_dir() else "check its permissions and encoding",
        ) from None
    try:
        values = _yaml(text)
    except yaml.YAMLError as error:
        raise _not_yaml(error, text, path) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            "the configuration file must hold sections",
            where=str(path),
            expected="a mapping such as `model: {path: …}`",
            found=type(values).__name__,
            fix="begin lines with the name of a section and a colon; examples/ has working files",
        )
    return values


def _not_yaml(error: yaml.YAMLError, text: str, path: Path) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    return ConfigError(
        "not valid YAML",
        where=f"{path}:{mark.line + 1}" if mark is not None else str(path),
        expected="indentation by spaces" if "\t" in line else None,
        found=_problem(error) + (f": {line.strip()}" if line.strip() else ""),
        fix=_yaml_fix(_problem(error), line),
    )


def _problem(error: yaml.YAMLError) -> str:
    """What the parser says, without the places it repeats."""
    said = (getattr(error, "context", None), getattr(error, "problem", None))
    return " ".join(part for part in said if part) or " ".join(str(error).split())


def _yaml_fix(problem: str, line: str) -> str:
    if "\t" in line:
        return "indent with spaces"
    if "given twice" in problem:
        return "put both under one, or remove one of them"
    return (
        "look at this line and the one above: brackets and quotes that are not closed, "
        "indentation, a space after each colon"
    )


def _unreadable(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


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
        expected=f"at {path}: a number from 0 to {len(node) - 1}"
        if node
        else "a list with entries",
        found=step if node else "an empty one",
        fix="set the whole list instead, or add the entry to the file",
    )


def _leads_through_value(path: str, node: Any, override: str) -> ConfigError:
    return ConfigError(
        "an override leads through a value that has no fields",
        where=override,
        expected=f"{path} to be a section",
        found=repr(node),
        fix=f"set {path} itself, or make it a section in the file",
    )


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
        raise as_config_error(error, EmbeddedEngineConfig, "engine.embedded") from None
