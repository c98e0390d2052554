"""One row of a data set, checked field by field.

`read_prompt` takes the fields of a raw row by the keys of the configuration and refuses what
cannot work, with a reason that a person can act on. `PromptRow` is the finished article: what a
rollout or an evaluation needs to ask one question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.config.data import DatasetConfig
from rollmill.data.readers import BadRowError
from rollmill.sample import IntArray

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt, ready to be answered.

    Attributes:
        prompt: as the data has it: text or chat messages.
        prompt_tokens: int32 [P], rendered and tokenized.
        label: the reference answer, any JSON value; None when the data has none.
        metadata: JSON object for rewards and hooks.
        row_id: where the row came from (`train.jsonl:7`), unique in its data set.
        images: what the row's images field held; empty for a text-only row.
    """

    prompt: Prompt
    prompt_tokens: IntArray
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    row_id: str = ""
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFields:
    """The checked fields of a row, before its prompt is rendered."""

    prompt: Prompt
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    images: tuple[Any, ...]


def read_prompt(record: dict[str, Any], config: DatasetConfig) -> RowFields:
    """The fields of `record` that the configuration names.

    Raises:
        BadRowError: a field is missing or has the wrong shape; the text says which.
    """
    return RowFields(
        prompt=_prompt(record, config),
        label=_label(record, config.label_key),
        metadata=read_metadata(record, config.metadata_key),
        tools=read_tools(record, config.tools_key),
        images=_images(record, config.images_key),
    )


def required_field(record: dict[str, Any], key: str, option: str) -> Any:
    """A field of a row; BadRowError names the fields there are."""
    if key in record:
        return record[key]
    names = ", ".join(record) or "none"
    raise BadRowError(
        f"no field {key!r} ({option}); the row's fields are {names}",
        fix=f"set {option} to the field that holds it"
        + (", or to null when there is none" if option == "data.label_key" else "")
        + "; when only some rows lack it, bad_rows: skip leaves them out",
    )


def _prompt(record: dict[str, Any], config: DatasetConfig) -> Prompt:
    value = required_field(record, config.prompt_key, "data.prompt_key")
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError("the prompt is empty")
        return value
    if not isinstance(value, list):
        raise BadRowError(
            f"the prompt must be text or a list of messages, found {type(value).__name__}"
        )
    if not config.apply_chat_template:
        raise BadRowError("the prompt is a list of messages, but apply_chat_template is false")
    return _messages(value, config)


def _messages(value: list[Any], config: DatasetConfig) -> list[dict[str, Any]]:
    if not value:
        raise BadRowError("the prompt is an empty list of messages")
    messages = [read_message(entry, number) for number, entry in enumerate(value, start=1)]
    continues = config.chat_template_kwargs.get("continue_final_message", False)
    if messages[-1]["role"] == "assistant" and not continues:
        raise BadRowError(
            "the last message is the assistant's, so nothing is left to answer (to have it "
            "continued, set chat_template_kwargs.continue_final_message)"
        )
    return messages


def read_message(entry: Any, number: int) -> dict[str, Any]:
    """One chat message, checked; `number` (from 1) is for the BadRowError."""
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise BadRowError(f"message {number} is not an object with a role and content")
    content = entry.get("content")
    if not isinstance(content, str | list) and not (content is None and entry.get("tool_calls")):
        raise BadRowError(f"message {number} ({entry['role']}) has no text content")
    # Tables give every message every column; a null one was not there.
    return {key: item for key, item in entry.items() if item is not None or key == "content"}


def _label(record: dict[str, Any], key: str | None) -> Any:
    if key is None:
        return None
    return _json_value(required_field(record, key, "data.label_key"), "the label")


def read_metadata(record: dict[str, Any], key: str | None) -> dict[str, Any]:
    """The row's metadata: an object, or one as JSON text; empty when there is none."""
    value = from_json_text(record.get(key) if key else None, "metadata")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRowError(
            f"metadata must be an object (or one as JSON text), found {type(value).__name__}"
        )
    checked: dict[str, Any] = _json_value(value, "metadata")
    return checked


def read_tools(record: dict[str, Any], key: str | None) -> list[dict[str, Any]] | None:
    """The row's tool schemas: a list, or one as JSON text; None when there are none."""
    value = from_json_text(record.get(key) if key else None, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRowError("tools must be a list of tool schemas (or one as JSON text)")
    return value


def _images(record: dict[str, Any], key: str | None) -> tuple[Any, ...]:
    value = record.get(key) if key else None
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not _is_text(value) else (value,)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes)


def from_json_text(value: Any, what: str) -> Any:
    """`value`, or what it says when it is JSON text; None for empty text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRowError(f"{what} is text that is not JSON: {error}") from error


def _json_value(value: Any, what: str) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRowError(f"{what} is not a JSON value: {error}") from error
    return value
