"""Samples and groups as bytes (between processes, in the ledger) and as rows of plain columns.

Invariant: `decode(encode(x)) == x`, bit for bit: NaN payloads of log-probs, integers beyond 64
bits and lone surrogates in user data, numpy arrays and `None` against empty included. The bytes
are one msgpack array in field order, headed by `FORMAT_VERSION`; nothing is ever unpickled.

What user values may hold is in `sample_values`; rows are written and read in `sample_rows` and
offered here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from rollmill.errors import DataError
from rollmill.sample import (
    EngineCounters,
    FloatArray,
    Group,
    IntArray,
    Sample,
    Segment,
    Status,
)
from rollmill.sample_rows import row_schema, row_to_sample, sample_to_row
from rollmill.sample_values import pack, unpack

__all__ = [
    "decode_group",
    "decode_sample",
    "encode_group",
    "encode_sample",
    "row_schema",
    "row_to_sample",
    "sample_to_row",
]

FORMAT_VERSION = 1
"""First entry of every message; another number is refused instead of guessed at."""

T = TypeVar("T")

_PLAIN_FIELDS = (
    "index",
    "group_index",
    "attempt",
    "prompt",
    "label",
    "metadata",
    "response",
    "failure",
    "reward",
    "reward_outcome",
    "reward_detail",
    "in_loss",
    "generate_function",
    "reward_function",
    "session_id",
    "timing",
    "teacher_log_probs",
    "multimodal_inputs",
    "routed_experts",
)
_COUNTER_FIELDS = (
    "num_calls",
    "prompt_tokens",
    "cached_tokens",
    "retractions",
    "spec_draft_tokens",
    "spec_accepted_tokens",
)


def encode_sample(sample: Sample) -> bytes:
    """`sample` as bytes.

    Raises:
        DataError: a user value (label, metadata, ...) is neither JSON-like nor a numpy array.
    """
    message = [FORMAT_VERSION, sample.prompt_tokens.tobytes(), _sample_fields(sample)]
    return pack(message, where=f"sample {sample.index}")


def decode_sample(data: bytes) -> Sample:
    """The sample that `encode_sample` wrote; DataError when `data` is something else."""
    prompt, row = _decode(data, "a sample", length=3)
    return _checked(lambda: _sample_from(_ints(prompt), row), "a sample")


def encode_group(group: Group) -> bytes:
    """`group` as bytes; a prompt that its samples share is written once.

    Raises:
        DataError: see `encode_sample`.
    """
    prompts: dict[bytes, int] = {}
    rows = []
    for sample in group.samples:
        number = prompts.setdefault(sample.prompt_tokens.tobytes(), len(prompts))
        rows.append([number, _sample_fields(sample)])
    message = [FORMAT_VERSION, group.group_index, list(prompts), rows]
    return pack(message, where=f"group {group.group_index}")


def decode_group(data: bytes) -> Group:
    """The group that `encode_group` wrote; samples with equal prompts share one array.

    Raises:
        DataError: `data` is not such a message.
    """
    group_index, raw_prompts, rows = _decode(data, "a group", length=4)

    def build() -> Group:
        prompts = [_ints(raw) for raw in raw_prompts]
        return Group(group_index, [_sample_from(prompts[number], row) for number, row in rows])

    return _checked(build, "a group")


def _sample_fields(sample: Sample) -> list[Any]:
    return [
        [_segment_fields(segment) for segment in sample.segments],
        sample.status.value,
        [getattr(sample.counters, name) for name in _COUNTER_FIELDS],
        *(getattr(sample, name) for name in _PLAIN_FIELDS),
    ]


def _segment_fields(segment: Segment) -> list[Any]:
    return [
        segment.token_ids.tobytes(),
        None if segment.log_probs is None else segment.log_probs.tobytes(),
        segment.trainable,
        segment.weight_version,
        segment.source,
    ]


def _sample_from(prompt_tokens: IntArray, row: Sequence[Any]) -> Sample:
    segments, status, counters, *plain = row
    return Sample(
        prompt_tokens=prompt_tokens,
        segments=[_segment_from(fields) for fields in segments],
        status=Status(status),
        counters=EngineCounters(**dict(zip(_COUNTER_FIELDS, counters, strict=True))),
        **dict(zip(_PLAIN_FIELDS, plain, strict=True)),
    )


def _segment_from(fields: Sequence[Any]) -> Segment:
    token_ids, log_probs, trainable, weight_version, source = fields
    return Segment(
        token_ids=_ints(token_ids),
        log_probs=None if log_probs is None else _floats(log_probs),
        trainable=trainable,
        weight_version=weight_version,
        source=source,
    )


def _ints(raw: bytes) -> IntArray:
    return np.frombuffer(raw, np.int32)


def _floats(raw: bytes) -> FloatArray:
    return np.frombuffer(raw, np.float32)


def _decode(data: bytes, what: str, *, length: int) -> list[Any]:
    try:
        message = unpack(data)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise _unreadable(what, str(error)) from error
    if not isinstance(message, list) or not message or message[0] != FORMAT_VERSION:
        found = message[0] if isinstance(message, list) and message else type(message).__name__
        raise _unreadable(what, f"a message headed by {found!r}")
    if len(message) != length:
        raise _unreadable(what, f"{len(message)} parts")
    return message[1:]


def _checked(build: Callable[[], T], what: str) -> T:
    try:
        return build()
    except (ValueError, TypeError, IndexError) as error:
        raise _unreadable(what, str(error)) from error


def _unreadable(what: str, found: str) -> DataError:
    return DataError(
        f"bytes do not hold {what}",
        expected=f"a message of format {FORMAT_VERSION} written by this module",
        found=found,
        fix="use the version of rollmill that wrote it",
    )
