"""What a `data.path` entry names: files on disk and a slice of their rows.

An entry is `PATTERN` or `PATTERN@[a:b]`. The pattern is a file, a glob, or a Hugging Face
`datasets` folder. It is looked for from the current directory first, then from the folder of the
configuration file, so that examples run from anywhere.
"""

from __future__ import annotations

import difflib
import glob
import re
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import DataError

_SLICE = re.compile(r"^(?P<pattern>.+)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]$", re.DOTALL)
_LOOKS_LIKE_SLICE = re.compile(r"@\[.*\]$")


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Python's `[start:stop]` over the rows of one entry; negative bounds count from the end."""

    start: int | None = None
    stop: int | None = None

    @property
    def is_everything(self) -> bool:
        """True when no row is left out."""
        return not self.start and self.stop is None

    @property
    def needs_count(self) -> bool:
        """True when the bounds mean nothing before the rows are counted."""
        return (self.start or 0) < 0 or (self.stop or 0) < 0

    def bounds(self, num_rows: int | None) -> tuple[int, int | None]:
        """First row and the row to stop before (None: to the end).

        `num_rows` may be None unless `needs_count`.
        """
        if num_rows is None:
            return self.start or 0, self.stop
        start, stop, _ = slice(self.start, self.stop).indices(num_rows)
        return start, stop


@dataclass(frozen=True, slots=True)
class DataPath:
    """One entry of `data.path`: its text, the files it stands for in order, and its slice."""

    text: str
    files: tuple[Path, ...]
    rows: RowSlice


def parse_entry(text: str) -> tuple[str, RowSlice]:
    """The pattern and the slice of `PATTERN@[a:b]`.

    Raises:
        DataError: the text ends like a slice but is none.
    """
    match = _SLICE.match(text)
    if match:
        start, stop = match["start"], match["stop"]
        bounds = RowSlice(int(start) if start else None, int(stop) if stop else None)
        return match["pattern"], bounds
    if _LOOKS_LIKE_SLICE.search(text):
        raise DataError(
            "the row slice of a data path cannot be read",
            where="data.path",
            expected="PATH@[a:b] with whole numbers, each optional, negative from the end",
            found=text,
            fix="write for example train.jsonl@[0:1000] or train.jsonl@[-200:]",
        )
    return text, RowSlice()


def find_entry(text: str, base_dir: Path) -> DataPath:
    """The files that the entry `text` stands for.

    Raises:
        DataError: nothing is there; the message says where it was looked for and what is near.
    """
    pattern, rows = parse_entry(text)
    for root in _roots(pattern, base_dir):
        files = _matches(root / Path(pattern).expanduser())
        if files:
            return DataPath(text, files, rows)
    raise _not_found(text, pattern, base_dir)


def _roots(pattern: str, base_dir: Path) -> tuple[Path, ...]:
    if Path(pattern).expanduser().is_absolute() or base_dir.resolve() == Path.cwd():
        return (Path(),)
    return (Path(), base_dir)


def _matches(path: Path) -> tuple[Path, ...]:
    if path.exists():
        return (path,)
    return tuple(Path(name) for name in sorted(glob.glob(str(path), recursive=True)))


def _not_found(text: str, pattern: str, base_dir: Path) -> DataError:
    places = [
        str((root / Path(pattern).expanduser()).parent.resolve())
        for root in _roots(pattern, base_dir)
    ]
    near = _nearest(pattern, [Path(place) for place in places])
    return DataError(
        "no such data file",
        where="data.path",
        expected="a .jsonl or .parquet file, a glob, or a Hugging Face datasets folder",
        found=f"{text} (looked in {' and in '.join(places)})",
        fix=(f"did you mean {near}? " if near else "")
        + ("Variables of the shell are not expanded here. " if "$" in text else "")
        + "Relative paths start from the current directory or from the config file's folder.",
    )


def _nearest(pattern: str, folders: list[Path]) -> str | None:
    names = [
        entry.name for folder in folders if folder.is_dir() for entry in sorted(folder.iterdir())
    ]
    close = difflib.get_close_matches(Path(pattern).name, names, n=1, cutoff=0.5)
    return str(Path(pattern).parent / close[0]) if close else None
