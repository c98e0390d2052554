"""Shards: Parquet files of recorded answers that exist whole or not at all.

A shard carries, in its file metadata, what it takes to know later that it is done and by which
settings, so a preparation that was killed finds its finished shards by looking at them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollmill.distill.checks import Refusals, RowLimits, problems_of
from rollmill.distill.manifest import ShardEntry
from rollmill.distill.rows import RecordedRow, shard_schema
from rollmill.errors import DataError

if TYPE_CHECKING:
    import pyarrow

METADATA_KEY = b"rollmill"
_READ_BYTES = 1 << 20


class ShardFacts(msgspec.Struct, frozen=True):
    """What a shard says about itself.

    Attributes:
        settings: fingerprint of the settings that decide its rows.
        seconds: spent on it, by phase.
    """

    settings: str
    seconds: dict[str, float]


def shard_name(number: int) -> str:
    """The file name of a shard, by its number from 0."""
    return f"shard_{number:05d}.parquet"


def write_shard(path: Path, rows: Sequence[RecordedRow], facts: ShardFacts) -> None:
    """Write a shard aside, flush it to the disk, and put it in place.

    Raises:
        DataError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [row.to_record() for row in rows]
    schema = shard_schema().with_metadata({METADATA_KEY: msgspec.json.encode(facts)})
    columns = [
        pa.array([record[name] for record in records], type=kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    ]
    aside = path.with_suffix(".tmp")
    try:
        with aside.open("wb") as file:
            pq.write_table(pa.Table.from_arrays(columns, schema=schema), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise DataError(
            "recorded answers cannot be written",
            where=str(path),
            found=str(error),
            fix="make room, or mend the folder's permissions, and prepare again: finished shards "
            "are kept",
        ) from error


def read_table(path: Path) -> pyarrow.Table:
    """A Parquet file in memory.

    Raises:
        DataError: it is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        table.validate(full=True)  # a text that is no UTF-8 would show when it is looked at
        str(table.schema)
        return table
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            "a file of recorded answers cannot be read",
            where=str(path),
            expected="a Parquet file that `rollmill distill prepare` wrote",
            found=str(error).splitlines()[0],
            fix="delete it and prepare again: only what is missing is done",
        ) from error


def facts_of(table: pyarrow.Table) -> ShardFacts | None:
    """What the file says about itself; None when it is no shard."""
    data = (table.schema.metadata or {}).get(METADATA_KEY)
    try:
        return None if data is None else msgspec.json.decode(data, type=ShardFacts)
    except msgspec.DecodeError:
        return None


def answers_in(table: pyarrow.Table) -> list[tuple[int, int]]:
    """(`prompt_index`, `attempt`) of each row, in order."""
    columns = (table[name].to_pylist() for name in ("prompt_index", "attempt"))
    return list(zip(*columns, strict=True))


def check_columns(table: pyarrow.Table, path: Path) -> None:
    """Raise DataError unless the file has exactly a shard's columns."""
    expected = shard_schema()
    if not table.schema.equals(expected):
        missing = sorted(set(expected.names) - set(table.schema.names))
        raise DataError(
            "a file of recorded answers has other columns",
            where=str(path),
            expected=", ".join(expected.names),
            found=f"none named {', '.join(missing)}" if missing else "other types or more columns",
        )


def records_of(table: pyarrow.Table, number: int) -> dict[str, Any]:
    """One row: vectors as lists, the rest as plain values."""
    record: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
    return record


def check_shard(
    table: pyarrow.Table, path: Path, limits: RowLimits, refusals: Refusals
) -> tuple[int, int]:
    """Note every row that cannot be used; the rows and their response tokens."""
    check_columns(table, path)
    num_tokens = 0
    number = 0
    for batch in table.to_batches(max_chunksize=64):
        for record in batch.to_pylist():
            refusals.add(path.name, number, problems_of(record, limits))
            num_tokens += len(record["response_tokens"] or ())
            number += 1
    return number, num_tokens


def entry_of(path: Path, num_rows: int, num_tokens: int, facts: ShardFacts) -> ShardEntry:
    """The manifest's line about a shard on the disk."""
    return ShardEntry(
        name=path.name,
        sha256=file_hash(path),
        num_rows=num_rows,
        generated_tokens=num_tokens,
        teacher_tokens=num_tokens,
        student_tokens=num_tokens,
        seconds=facts.seconds,
    )


def file_hash(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
