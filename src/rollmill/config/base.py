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
