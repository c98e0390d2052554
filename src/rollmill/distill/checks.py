"""What a recorded answer must be before anybody learns from it. Nothing is ever defaulted.

`problems_of` looks at one raw record and says all that is wrong with it; `Refusals` collects that
over all files and names every refused row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from rollmill.config.opd import not_plain
from rollmill.config.sampling import SamplingConfig
from rollmill.distill.rows import STATUS_OF, VECTORS, checksum_of
from rollmill.errors import DataError

MAX_SHOWN = 20
"""Refused rows that an error spells out; the rest are listed without their reasons."""


@dataclass(frozen=True)
class RowLimits:
    """What rows are checked against.

    Attributes:
        vocab_size: token ids are below it.
        context_length: most tokens of prompt and response together.
        is_any_sampling: whether rows may come from another distribution than was scored.
    """

    vocab_size: int
    context_length: int
    is_any_sampling: bool = False


def problems_of(record: Mapping[str, Any], limits: RowLimits) -> list[str]:
    """All that is wrong with a record of `rows.shard_schema()`; empty when it may be used."""
    missing = [name for name, value in record.items() if value is None]
    if missing:
        return [f"no value for {name}" for name in missing]
    found = list(token_problems(record, limits))
    found += vector_problems(record, len(record["response_tokens"]), VECTORS)
    if record["finish_reason"] not in STATUS_OF:
        found.append(
            f"finish_reason: expected {' or '.join(STATUS_OF)}, found {record['finish_reason']!r}"
        )
    if not limits.is_any_sampling:
        found += _sampling_problems(record["sampling_json"])
    if not found and checksum_of(record) != record["checksum"]:
        found.append("the checksum is of other contents: the row was changed after it was written")
    return found


def token_problems(record: Mapping[str, Any], limits: RowLimits) -> Iterator[str]:
    """Ids outside the vocabulary, an empty prompt, too many tokens."""
    for name in ("prompt_tokens", "response_tokens"):
        for position, token in enumerate(record[name]):
            if type(token) is not int or not 0 <= token < limits.vocab_size:
                yield (
                    f"{name}: expected ids from 0 to {limits.vocab_size - 1}, "
                    f"found {token!r} at position {position}"
                )
                break
    if len(record["prompt_tokens"]) == 0:
        yield "prompt_tokens: expected at least one, found none"
    length = len(record["prompt_tokens"]) + len(record["response_tokens"])
    if length > limits.context_length:
        yield f"expected at most {limits.context_length} tokens in all, found {length}"


def vector_problems(
    record: Mapping[str, Any], length: int, names: tuple[str, ...]
) -> Iterator[str]:
    """Vectors that are not one finite log-prob, at most 0, per response token."""
    for name in names:
        raw = record[name]
        if len(raw) != length:
            yield f"{name}: expected {length}, one per response token, found {len(raw)}"
            continue
        numbers = [value if isinstance(value, (int, float)) else np.nan for value in raw]
        values = np.array(numbers, np.float64)
        is_bad = ~(np.isfinite(values) & (values <= 0))
        if is_bad.any():
            position = int(is_bad.argmax())
            yield (
                f"{name}: expected finite numbers, none above 0, "
                f"found {values[position]} at position {position}"
            )


def mask_problems(mask: Any, length: int) -> Iterator[str]:
    """A mask that is not one 0 or 1 per response token, with a 1 somewhere."""
    if len(mask) != length:
        yield f"loss_mask: expected {length}, one per response token, found {len(mask)}"
    elif any(value not in (0, 1) for value in mask):
        odd = next(value for value in mask if value not in (0, 1))
        yield f"loss_mask: expected 0 or 1, found {odd!r}"
    elif length and not sum(mask):
        yield "loss_mask: expected at least one 1, found none"


def _sampling_problems(text: str) -> list[str]:
    try:
        sampling = SamplingConfig.model_validate_json(text)
    except ValidationError as error:
        return [f"sampling_json: {error.errors()[0]['msg']}"]
    return [f"sampled from another distribution than was scored: {p}" for p in not_plain(sampling)]


@dataclass
class Refusals:
    """Rows that cannot be used, by file and row number, with every reason."""

    lines: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, file: str, row: int, problems: list[str]) -> None:
        """Note what is wrong with a row; nothing when `problems` is empty."""
        if problems:
            place = f"{file}:{row}"
            self.places.append(place)
            self.lines.append(f"{place}: {'; '.join(problems)}")

    def raise_any(self, what: str, *, fix: str) -> None:
        """Raise DataError when a row was refused; every one is named.

        Args:
            what: the sentence of the error.
            fix: what to do.
        """
        if not self.lines:
            return
        rest = self.places[MAX_SHOWN:]
        shown = "\n    ".join(self.lines[:MAX_SHOWN])
        more = f"\n    and {len(rest)} more: {', '.join(rest)}" if rest else ""
        raise DataError(
            what, where=self.places[0], found=f"{len(self.lines)} rows\n    {shown}{more}", fix=fix
        )
