"""Raw rows from files, one at a time, each with the place a person would look for it.

Nothing is judged here except that a row is a JSON-like object; a row that is not becomes a
`RawRow` whose `load` raises `BadRowError`, so that the caller decides between stopping and
skipping. Integers are exact whatever their size; Python's own `NaN` extension is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from rollmill.data.paths import DataPath
from rollmill.errors import DataError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
_BATCH_ROWS = 1024
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class BadRowError(Exception):
    """One row cannot be used; the text is the reason, `fix` what to do when that is known."""

    def __init__(self, reason: str, *, fix: str | None = None) -> None:
        super().__init__(reason)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that has not been looked at yet.

    Attributes:
        where: `file:line` for text files (from 1), `file:row N` for tables (from 1).
        load: yields the row's fields, or raises BadRowError.
    """

    where: str
    load: Callable[[], dict[str, Any]]


def read_rows(path: DataPath) -> Iterator[RawRow]:
    """The rows of one `data.path` entry, its slice applied, files in order.

    Raises:
        DataError: a file has an unknown kind or cannot be read.
    """

    def every_row() -> Iterator[RawRow]:
        return chain.from_iterable(_read_file(file) for file in path.files)

    if path.rows.is_everything:
        return every_row()
    num_rows = sum(1 for _ in every_row()) if path.rows.needs_count else None
    start, stop = path.rows.bounds(num_rows)
    return islice(every_row(), start, stop)


def _read_file(file: Path) -> Iterator[RawRow]:
    if file.is_dir():
        return _read_datasets_folder(file)
    suffix = file.suffix.lower()
    if suffix in JSON_SUFFIXES:
        return _read_json_lines(file)
    if suffix in PARQUET_SUFFIXES:
        return _read_parquet(file)
    raise DataError(
        "a data file of an unknown kind",
        where=str(file),
        expected=f"a name that ends in {', '.join((*JSON_SUFFIXES, *PARQUET_SUFFIXES))}",
        found=file.name,
        fix="convert it to JSON lines (one object per line) or Parquet",
    )


def _read_json_lines(file: Path) -> Iterator[RawRow]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield RawRow(f"{file}:{number}", _json_loader(text.strip()))
    except OSError as error:
        raise _unreadable(file, "a readable file of JSON lines", error) from error


def _json_loader(text: bytes) -> Callable[[], dict[str, Any]]:
    return lambda: parse_json_object(text)


def parse_json_object(text: bytes) -> dict[str, Any]:
    """One JSON object, strictly.

    Raises:
        BadRowError: not UTF-8, not JSON, not an object, or text that is not Unicode.
    """
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRowError(f"not UTF-8: byte {error.start} is 0x{text[error.start]:02x}") from error
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRowError(f"expected a JSON object, found {_json_type(value)}{_array_hint(text)}")
    if _SURROGATE_ESCAPE.search(text):
        refuse_lone_surrogates(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _array_hint(text: bytes) -> str:
    return " (write one object per line, not one array)" if text.startswith(b"[") else ""


def _json_type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", int: "a number", float: "a number", list: "an array"}
    return names.get(type(value), type(value).__name__)


def refuse_lone_surrogates(value: Any) -> None:
    """Raise BadRowError when a string anywhere in `value` is not valid Unicode text.

    Such text cannot be tokenized or written as UTF-8, and would fail much later.
    """
    for text in _strings(value):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise BadRowError(
                f"text with a lone surrogate (U+{code:04X}), which is not Unicode text"
            ) from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _read_parquet(file: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            yield from _table_rows(file, table.iter_batches(batch_size=_BATCH_ROWS))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, "a Parquet file", error) from error


def _table_rows(file: Path, batches: Iterable[Any]) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield RawRow(f"{file}:row {number}", _record_loader(_as_written(record)))


def _as_written(value: Any, *, is_in_list: bool = False) -> Any:
    """A table's value without the fields that only other entries of the same list have.

    The entries of a list (messages, tools) share one type in a table: each gets the fields of all,
    null where it had none, down to the arguments of a tool call. Templates would show them.
    """
    if isinstance(value, list):
        return [_as_written(entry, is_in_list=True) for entry in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _as_written(entry, is_in_list=is_in_list)
        for key, entry in value.items()
        if entry is not None or not is_in_list or key == "content"
    }


def _record_loader(record: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: record


def _read_datasets_folder(folder: Path) -> Iterator[RawRow]:
    """Rows of what Hugging Face `datasets` wrote with `save_to_disk` (Arrow stream files)."""
    import pyarrow as pa

    for file in _arrow_files(folder):
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
                yield from _table_rows(file, batches)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, "an Arrow stream file", error) from error


def _arrow_files(folder: Path) -> list[Path]:
    split_list = folder / "dataset_dict.json"
    if split_list.is_file():
        splits = json.loads(split_list.read_text(encoding="utf-8")).get("splits", [])
        if len(splits) != 1:
            raise DataError(
                "a datasets folder with several splits",
                where=str(folder),
                expected="one split",
                found=", ".join(splits) or "none",
                fix=f"name the split: {folder / (splits[0] if splits else 'train')}",
            )
        return _arrow_files(folder / splits[0])
    state_file = folder / "state.json"
    if not state_file.is_file():
        raise DataError(
            "a folder that is not a Hugging Face datasets folder",
            where=str(folder),
            expected="a folder written by Dataset.save_to_disk (with state.json)",
            found=", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing",
            fix=f"for a folder of files give a glob: {folder}/*.jsonl",
        )
    state = json.loads(state_file.read_text(encoding="utf-8"))
    return [folder / entry["filename"] for entry in state["_data_files"]]


def _unreadable(file: Path, kind: str, error: Exception) -> DataError:
    return DataError(
        "a data file cannot be read",
        where=str(file),
        expected=kind,
        found=str(error).strip().splitlines()[0],
        fix="check that the file is complete (an interrupted copy?)",
    )
