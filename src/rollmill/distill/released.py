"""The column layout of the paper's released files, read as strictly as our own.

A row is `prompt` (rendered text), `label`, and `metadata` with `response_tokens`, `loss_mask`,
`teacher_log_probs`, `student_log_probs`, `response` and a flag. Such files name no model: which
teacher scored, which student was sampled and how, nobody can tell from them, so each of these has
to be allowed by name (`opd.allow_mismatch`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rollmill.config.sampling import SamplingConfig
from rollmill.data.template import Tokenizer
from rollmill.distill.checks import RowLimits, mask_problems, token_problems, vector_problems
from rollmill.distill.mismatch import Difference
from rollmill.distill.rows import RecordedRow
from rollmill.sample import float_array, int_array

FLAGS = ("is_lightning_opd", "is_offline_opd")
"""The flag's name, and its older one."""

COLUMNS = ("prompt", "metadata")
_VECTORS = ("teacher_log_probs", "student_log_probs")
_REQUIRED = ("response_tokens", "loss_mask", *_VECTORS)

UNKNOWN = [
    Difference("teacher", "the file does not say who scored it", "a manifest", "none"),
    Difference("student", "the file does not say who was sampled", "a manifest", "none"),
    Difference("tokenizer", "the file does not say whose token ids it holds", "a manifest", "none"),
    Difference("template", "the file does not say how prompts were rendered", "a manifest", "none"),
    Difference("sampling", "the file does not say how it was sampled", "a manifest", "none"),
]
"""What no file of this layout can prove."""


def problems_of_released(
    record: Mapping[str, Any], prompt_tokens: list[int], limits: RowLimits
) -> list[str]:
    """All that is wrong with a record; empty when it may be used."""
    metadata = record.get("metadata")
    if not isinstance(record.get("prompt"), str) or not isinstance(metadata, Mapping):
        return ["expected prompt as text and metadata as a struct"]
    if not any(metadata.get(flag) is True for flag in FLAGS):
        return [f"metadata.{FLAGS[0]}: expected true, found {metadata.get(FLAGS[0])!r}"]
    missing = [name for name in _REQUIRED if metadata.get(name) is None]
    if missing:  # a column that other rows have is null here
        return [f"no value for metadata.{name}" for name in missing]
    scalars = [name for name in _REQUIRED if not isinstance(metadata[name], list)]
    if scalars:
        return [f"metadata.{n}: expected a list, found {metadata[n]!r:.40}" for n in scalars]
    fields = {**metadata, "prompt_tokens": prompt_tokens}
    length = len(metadata["response_tokens"])
    return [
        *token_problems(fields, limits),
        *vector_problems(metadata, length, _VECTORS),
        *mask_problems(metadata["loss_mask"], length),
    ]


def row_of_released(
    record: Mapping[str, Any], number: int, prompt_tokens: list[int], end_ids: Collection[int]
) -> RecordedRow:
    """The row that a checked record is; its finish reason is read off its last token."""
    metadata = record["metadata"]
    tokens = int_array(metadata["response_tokens"])
    student = float_array(metadata["student_log_probs"])
    kept = {
        name: value
        for name, value in metadata.items()
        if name not in (*_REQUIRED, *FLAGS, "response")
    }
    return RecordedRow(
        prompt_index=number,
        attempt=0,
        prompt=record["prompt"],
        prompt_tokens=int_array(prompt_tokens),
        response_tokens=tokens,
        response=metadata.get("response") or "",
        finish_reason="stop" if len(tokens) and int(tokens[-1]) in end_ids else "length",
        sampler_log_probs=student,
        student_log_probs=student,
        teacher_log_probs=float_array(metadata["teacher_log_probs"]),
        teacher="",
        sampling=SamplingConfig(),
        label=record.get("label"),
        metadata=kept,
        loss_mask=np.array(metadata["loss_mask"], np.bool_),
    )


def encode_prompt(text: Any, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a rendered prompt: the template wrote all special tokens already."""
    if not isinstance(text, str):
        return []
    ids: list[int] = tokenizer([text], add_special_tokens=False, verbose=False)["input_ids"][0]
    return ids
