"""What every section of the configuration has in common."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """One section of the YAML file: immutable, and unknown fields are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _off_is_a_word(cls, values: Any) -> Any:
        """YAML reads a bare `off` as false; where a field has that choice, it is what is meant."""
        if not isinstance(values, dict):
            return values
        meant = {
            name: "off"
            for name, info in cls.model_fields.items()
            if values.get(name) is False
            and get_origin(info.annotation) is Literal
            and "off" in get_args(info.annotation)
        }
        return {**values, **meant} if meant else values

    @model_validator(mode="before")
    @classmethod
    def _empty_section_has_its_defaults(cls, values: Any) -> Any:
        """`run:` with nothing below it (every line commented out) is a section without changes."""
        if not isinstance(values, dict):
            return values
        empty: dict[str, Any] = {
            name: {}
            for name, info in cls.model_fields.items()
            if name in values
            and values[name] is None
            and isinstance(info.annotation, type)
            and issubclass(info.annotation, Section)
        }
        return {**values, **empty} if empty else values
