"""Samples as rows of plain columns, for Parquet files that any tool can read.

Token ids and log-probs are lists, user data (prompt, label, metadata, reward parts) is JSON text,
and each segment is one small struct that says where its tokens begin and who wrote them.

Invariant: `row_to_sample(sample_to_row(x)) == x`, also through a Parquet file with `row_schema()`,
for every sample whose user data is JSON (object keys are text). The one exception: lone
surrogates in plain text columns (`response`, `failure`) are written as `?`, since Parquet text is
UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmill.errors import DataError
from rollmill.sample import EngineCounters, Sample, Segment, Status, float_array, int_array
from rollmill.sample_values import pack, pack_array, unpack, unpack_array

if TYPE_CHECKING:
    import pyarrow

_PLAIN = (
    "index",
    "group_index",
    "attempt",
    "reward_outcome",
    "in_loss",
    "generate_function",
    "reward_function",
    "session_id",
)
_TEXT = ("failure", "reward_detail")
_JSON = ("prompt", "label", "metadata", "reward", "timing")
_COUNTERS = (
    "num_calls",
    "prompt_tokens",
    "cached_tokens",
    "retractions",
    "spec_draft_tokens",
    "spec_accepted_tokens",
)


def row_schema() -> pyarrow.Schema:
    """The Arrow schema of the rows; imports pyarrow."""
    import pyarrow as pa

    text, whole, tokens = pa.string(), pa.int64(), pa.list_(pa.int32())
    log_probs = pa.list_(pa.float32())
    segment = pa.struct(
        [
            ("length", whole),
            ("trainable", pa.bool_()),
            ("weight_version", whole),
            ("source", text),
            ("has_log_probs", pa.bool_()),
        ]
    )
    counters = pa.struct([(name, whole) for name in _COUNTERS])
    return pa.schema(
        [
            ("index", whole),
            ("group_index", whole),
            ("attempt", whole),
            ("status", text),
            ("score", pa.float64()),
            ("response", text),
            ("prompt_tokens", tokens),
            ("response_tokens", tokens),
            ("rollout_log_probs", log_probs),
            ("segments", pa.list_(segment)),
            ("in_loss", pa.bool_()),
            ("failure", text),
            ("reward_outcome", text),
            ("reward_detail", text),
            *((f"{name}_json", text) for name in _JSON),
            ("generate_function", text),
            ("reward_function", text),
            ("session_id", text),
            ("counters", counters),
            ("teacher_log_probs", log_probs),
            ("multimodal_inputs", pa.binary()),
            ("routed_experts", pa.binary()),
        ]
    )


def sample_to_row(sample: Sample) -> dict[str, Any]:
    """`sample` as one value per column of `row_schema()`.

    `score` repeats the reward where that is one number, so that tools can average it.

    Raises:
        DataError: label, metadata, reward or timing is not JSON.
    """
    where = f"sample {sample.index}"
    row: dict[str, Any] = {name: getattr(sample, name) for name in _PLAIN}
    row |= {name: _utf8(getattr(sample, name)) for name in _TEXT}
    row |= {f"{name}_json": to_json(getattr(sample, name), where, name) for name in _JSON}
    images, experts = sample.multimodal_inputs, sample.routed_experts
    is_number = sample.reward is not None and not isinstance(sample.reward, Mapping)
    return row | {
        "status": sample.status.value,
        "score": sample.scalar_reward() if is_number else None,
        "response": _utf8(sample.response),
        "prompt_tokens": sample.prompt_tokens.tolist(),
        "response_tokens": sample.response_tokens.tolist(),
        "rollout_log_probs": sample.rollout_log_probs.tolist(),
        "segments": [_segment_row(segment) for segment in sample.segments],
        "counters": {name: getattr(sample.counters, name) for name in _COUNTERS},
        "teacher_log_probs": _optional_list(sample.teacher_log_probs),
        "multimodal_inputs": None if images is None else pack(images, where=where),
        "routed_experts": None if experts is None else pack_array(experts),
    }


def row_to_sample(row: Mapping[str, Any]) -> Sample:
    """The sample that `sample_to_row` was given.

    Raises:
        DataError: a column is missing or its values do not fit together.
    """
    try:
        return _sample_from(row)
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(
            "a row does not hold a sample",
            expected="the columns of rollmill.sample_rows.row_schema()",
            found=f"{type(error).__name__}: {error}",
        ) from error


def _sample_from(row: Mapping[str, Any]) -> Sample:
    teacher, images, experts = (
        row[name] for name in ("teacher_log_probs", "multimodal_inputs", "routed_experts")
    )
    return Sample(
        prompt_tokens=int_array(row["prompt_tokens"]),
        segments=_segments_from(row),
        response=row["response"],
        status=Status(row["status"]),
        counters=EngineCounters(**row["counters"]),
        teacher_log_probs=None if teacher is None else float_array(teacher),
        multimodal_inputs=None if images is None else unpack(images),
        routed_experts=None if experts is None else unpack_array(experts),
        **{name: row[name] for name in (*_PLAIN, *_TEXT)},
        **{name: json.loads(row[f"{name}_json"]) for name in _JSON},
    )


def _segment_row(segment: Segment) -> dict[str, Any]:
    return {
        "length": len(segment),
        "trainable": segment.trainable,
        "weight_version": segment.weight_version,
        "source": segment.source,
        "has_log_probs": segment.log_probs is not None,
    }


def _segments_from(row: Mapping[str, Any]) -> list[Segment]:
    token_ids, log_probs = int_array(row["response_tokens"]), float_array(row["rollout_log_probs"])
    segments, start = [], 0
    for entry in row["segments"]:
        stop = start + entry["length"]
        segments.append(
            Segment(
                token_ids=token_ids[start:stop],
                log_probs=log_probs[start:stop] if entry["has_log_probs"] else None,
                trainable=entry["trainable"],
                weight_version=entry["weight_version"],
                source=entry["source"],
            )
        )
        start = stop
    if start != len(token_ids) or start != len(log_probs):
        raise ValueError(
            f"segments cover {start} tokens, the row has {len(token_ids)} token ids "
            f"and {len(log_probs)} log-probs"
        )
    return segments


def to_json(value: Any, where: str, name: str) -> str:
    """A user value of a sample as JSON text; numpy's numbers and arrays as plain ones.

    Raises:
        DataError: it holds something else.
    """
    try:
        return json.dumps(value, default=_plain_numbers)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} cannot be written as JSON",
            where=where,
            expected="objects with text keys, lists, text, numbers, true, false, null",
            found=str(error),
            fix="keep other objects out of the sample",
        ) from error


def _plain_numbers(value: Any) -> Any:
    """What user functions computed with numpy."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} of type {type(value).__name__}")


def _utf8(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode()


def _optional_list(values: np.ndarray[Any, Any] | None) -> list[float] | None:
    return None if values is None else values.tolist()
