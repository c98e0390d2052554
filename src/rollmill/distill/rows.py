"""One recorded answer: what the student wrote and what student and teacher think of each token.

Tokens are stored, never text to be tokenized again: the response ends with the very end-of-sequence
token that was sampled. Each row carries a checksum over everything in it.

Invariant: every per-token vector of a `RecordedRow` has one entry per response token, whatever the
loss mask says; the response length is the number of response tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmill.config.sampling import SamplingConfig
from rollmill.data.prompts import Prompt
from rollmill.sample import (
    BoolArray,
    FloatArray,
    IntArray,
    Sample,
    Segment,
    Status,
    float_array,
    int_array,
)

if TYPE_CHECKING:
    import pyarrow

STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}
"""Sample status by recorded finish reason; there are no others."""

VECTORS = ("sampler_log_probs", "student_log_probs", "teacher_log_probs")
"""Columns with one log-prob per response token."""

_TEXT_COLUMNS = ("prompt_json", "response", "finish_reason", "teacher", "label_json",
                 "metadata_json", "sampling_json", "checksum")  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRow:
    """One answer.

    Attributes:
        prompt_index: the prompt's place in the data set.
        attempt: which answer to it.
        prompt: as the data has it, for rewards and people.
        prompt_tokens: int32 [P].
        response_tokens: int32 [R], the sampled end of sequence included.
        response: as text, for people.
        finish_reason: `stop` or `length`.
        sampler_log_probs: float32 [R], as the engine reported them when it sampled.
        student_log_probs: float32 [R], of the same tokens scored at temperature 1.
        teacher_log_probs: float32 [R], under the teacher, scored the same way.
        teacher: the teacher's name; empty for the one without a name.
        sampling: the sampling parameters.
        label: the reference answer, any JSON value.
        metadata: JSON object of the data row.
        loss_mask: bool [R]; all True in what `prepare` writes.
    """

    prompt_index: int
    attempt: int
    prompt: Prompt
    prompt_tokens: IntArray
    response_tokens: IntArray
    response: str
    finish_reason: str
    sampler_log_probs: FloatArray
    student_log_probs: FloatArray
    teacher_log_probs: FloatArray
    teacher: str
    sampling: SamplingConfig
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    loss_mask: BoolArray | None = None

    def segments(self) -> list[Segment]:
        """The response: one segment per run of the mask (an empty one for an empty answer)."""
        length = len(self.response_tokens)
        mask = np.ones(length, np.bool_) if self.loss_mask is None else self.loss_mask
        edges = np.flatnonzero(np.diff(mask)) + 1 if length else np.zeros(0, np.int64)
        bounds = [0, *edges.tolist(), length]
        segments = []
        for start, stop in pairwise(bounds):
            segment = Segment.from_engine(
                self.response_tokens[start:stop], self.sampler_log_probs[start:stop], 0
            )
            is_kept = start == stop or bool(mask[start])
            segments.append(segment if is_kept else segment.untrainable())
        return segments

    def to_sample(self, *, index: int, group_index: int, attempt: int) -> Sample:
        """The row as a finished sample, written by weight version 0."""
        return Sample(
            prompt_tokens=self.prompt_tokens,
            index=index,
            group_index=group_index,
            attempt=attempt,
            prompt=self.prompt,
            label=self.label,
            metadata=dict(self.metadata),
            segments=self.segments(),
            response=self.response,
            status=STATUS_OF[self.finish_reason],
            teacher_log_probs=self.teacher_log_probs,
        )

    def to_record(self) -> dict[str, Any]:
        """One value per column of `shard_schema()`, the checksum included."""
        record: dict[str, Any] = {
            "prompt_index": self.prompt_index,
            "attempt": self.attempt,
            "prompt_json": json.dumps(self.prompt),
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "response": self.response.encode("utf-8", "replace").decode(),
            "finish_reason": self.finish_reason,
            "teacher": self.teacher,
            "label_json": json.dumps(self.label),
            "metadata_json": json.dumps(self.metadata),
            "sampling_json": self.sampling.model_dump_json(),
            **{name: getattr(self, name) for name in VECTORS},
        }
        return record | {"checksum": checksum_of(record)}


def row_of(record: Mapping[str, Any]) -> RecordedRow:
    """The row that `to_record` gave `record`; it must have been checked (`checks.py`)."""
    return RecordedRow(
        prompt_index=record["prompt_index"],
        attempt=record["attempt"],
        prompt=json.loads(record["prompt_json"]),
        prompt_tokens=int_array(record["prompt_tokens"]),
        response_tokens=int_array(record["response_tokens"]),
        response=record["response"],
        finish_reason=record["finish_reason"],
        teacher=record["teacher"],
        sampling=SamplingConfig.model_validate_json(record["sampling_json"]),
        label=json.loads(record["label_json"]),
        metadata=json.loads(record["metadata_json"]),
        sampler_log_probs=float_array(record["sampler_log_probs"]),
        student_log_probs=float_array(record["student_log_probs"]),
        teacher_log_probs=float_array(record["teacher_log_probs"]),
    )


def checksum_of(record: Mapping[str, Any]) -> str:
    """128 bits of SHA-256 over every column but the checksum, lengths included."""
    digest = hashlib.sha256()
    for name in sorted(record):
        if name == "checksum":
            continue
        value = record[name]
        if isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
        elif isinstance(value, int):
            data = str(value).encode()
        else:
            dtype = np.float32 if name in VECTORS else np.int32
            data = np.ascontiguousarray(value, dtype=dtype).tobytes()
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()[:32]


def shard_schema() -> pyarrow.Schema:
    """The Arrow schema of a shard; imports pyarrow."""
    import pyarrow as pa

    tokens, log_probs = pa.list_(pa.int32()), pa.list_(pa.float32())
    return pa.schema(
        [
            ("prompt_index", pa.int64()),
            ("attempt", pa.int32()),
            ("prompt_tokens", tokens),
            ("response_tokens", tokens),
            *((name, log_probs) for name in VECTORS),
            *((name, pa.string()) for name in _TEXT_COLUMNS),
        ]
    )
