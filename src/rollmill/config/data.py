"""Where prompts come from."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from rollmill.config.base import Section
from rollmill.config.sft import SftConfig

_SET_BY_US = ("conversation", "tools", "tokenize", "return_dict")
"""Arguments of `apply_chat_template` that are no variables of the template."""


class DatasetConfig(Section):
    """One data set: files, or a procedural task."""

    path: str | tuple[str, ...] | dict[str, float] | None = None
    """A JSONL or Parquet file, a glob, a Hugging Face `datasets` folder, a list of those, or a
    mapping from path to mixing weight. `path@[a:b]` takes a slice of rows. Relative paths start
    from the current directory, or else from the configuration file's folder."""
    reasoning_gym: str | None = None
    """Name of a reasoning-gym task instead of a path."""
    reasoning_gym_params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task (`size`, `seed`, and the task's own)."""
    prompt_key: str = "prompt"
    """Field with the prompt: text, or a list of chat messages."""
    label_key: str | None = "label"
    """Field with the reference answer; null when there is none."""
    metadata_key: str | None = "metadata"
    """Field with a JSON object handed to rewards and hooks."""
    tools_key: str | None = "tools"
    """Field with tool schemas for the chat template."""
    images_key: str | None = "images"
    """Field with images for multimodal models."""
    apply_chat_template: bool = True
    """Render the prompt with the tokenizer's chat template; text becomes one user message."""
    system_prompt: str | None = None
    """System message put before each prompt. An empty string stops templates that insert a
    default one from doing so."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the chat template (for example `enable_thinking: false`)."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are left out and counted; null allows up to the context limit."""
    shuffle: bool = True
    """A new permutation every epoch, from the run's seed and the epoch."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """`stop`: a bad row ends start-up with file and line. `skip`: it is left out and counted."""
    max_rows: int | None = Field(None, ge=1)
    """Read only the first rows (of each path, when paths have mixing weights)."""
    sft: SftConfig | None = None
    """Rows hold the answers to learn (SFT), with `rollout.source: replay`; null for prompts."""

    @model_validator(mode="after")
    def _one_source(self) -> DatasetConfig:
        if (self.path is None) == (self.reasoning_gym is None):
            raise ValueError("give exactly one of `path` and `reasoning_gym`")
        return self

    @model_validator(mode="after")
    def _paths(self) -> DatasetConfig:
        if self.path is not None and len(self.path) == 0:
            raise ValueError("path: expected at least one path, found none")
        if isinstance(self.path, dict):
            for name, weight in self.path.items():
                if not (weight > 0 and math.isfinite(weight)):
                    raise ValueError(
                        f"path: expected a mixing weight above 0 for {name}, found {weight}"
                    )
        return self

    @model_validator(mode="after")
    def _recorded_answers(self) -> DatasetConfig:
        if self.sft is None:
            return self
        if self.reasoning_gym is not None:
            raise ValueError("sft: a reasoning-gym task has no recorded answers: give `path`")
        if self.max_prompt_tokens is not None:
            raise ValueError(
                "max_prompt_tokens: expected null with sft (sft.max_tokens bounds the whole), "
                f"found {self.max_prompt_tokens}"
            )
        if self.sft.response_key is None and not self.apply_chat_template:
            raise ValueError(
                "sft: conversations need apply_chat_template: true; for rows of plain text give "
                "sft.response_key"
            )
        if self.chat_template_kwargs.get("continue_final_message"):
            raise ValueError("sft: the rows end with answers, so there is none to continue")
        return self

    @model_validator(mode="after")
    def _template_options(self) -> DatasetConfig:
        if not self.apply_chat_template and (self.system_prompt or self.chat_template_kwargs):
            raise ValueError(
                "system_prompt and chat_template_kwargs need apply_chat_template: true "
                "(without the template, prompts are used as they are)"
            )
        taken = {*_SET_BY_US, *(("add_generation_prompt",) if self.sft else ())}
        if wrong := sorted(taken & {*self.chat_template_kwargs}):
            raise ValueError(
                f"chat_template_kwargs: expected names that the template reads, found {wrong[0]} "
                "(rollmill gives it itself, from the rows and the other fields of data)"
            )
        return self
