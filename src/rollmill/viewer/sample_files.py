"""The Parquet files of a run: found by name, indexed by light columns, read by row group.

Listing a step reads no tokens; opening a sample reads the one row group it lies in. Both are kept
for the next look, under a key that changes when the file does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollmill.viewer.cache import SizedCache
from rollmill.viewer.errors import NotInRun
from rollmill.viewer.texts import PREVIEW, clean, parse_json, preview, prompt_preview

TRAIN = "train"
DROPPED = "dropped"
FOLDERS = {TRAIN: "samples", DROPPED: "dropped"}
"""Kinds of samples that are no evaluation set, and where they lie."""
FILE_NAME = re.compile(r"step_(\d+)\.parquet")
LIGHT_COLUMNS = (
    "index",
    "group_index",
    "attempt",
    "status",
    "score",
    "reward_json",
    "reward_outcome",
    "in_loss",
    "prompt_json",
    "response",
    "decision",
    "reason",
)
HEAVY_COLUMNS = ("multimodal_inputs", "routed_experts")
MAX_INDEX_ROWS = 200_000
MAX_GROUP_BYTES = 256 << 20

FileKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sample in the list of a step.

    Attributes:
        row: its row in the file.
        index: the sample's number in the run.
        group: which prompt.
        attempt: which answer to it.
        status: `completed`, `truncated`, …
        reward: the number to sort and filter by; None when there is none.
        outcome: how judging ended.
        in_loss: whether the sample entered the loss.
        length: response tokens.
        prompt: beginning of the prompt's last message.
        response: beginning of the response.
        decision: `rejected` or `failed` for a sample that was dropped, else empty.
        reason: why it was dropped.
    """

    row: int
    index: int
    group: int
    attempt: int
    status: str
    reward: float | None
    outcome: str
    in_loss: bool
    length: int
    prompt: str
    response: str
    decision: str = ""
    reason: str = ""


class SampleFiles:
    """The samples of one run.

    Args:
        root: the run folder.
        reward_key: which part is the reward when rewards have parts.
    """

    def __init__(self, root: Path, reward_key: str | None = None) -> None:
        self._root = root
        self._reward_key = reward_key
        self._indexes: SizedCache[list[SampleRow]] = SizedCache(MAX_INDEX_ROWS)
        self._row_groups: SizedCache[pa.Table] = SizedCache(MAX_GROUP_BYTES)

    def kinds(self) -> list[str]:
        """`train`, `dropped` when there are such files, then the evaluation sets that have some."""
        dropped = [DROPPED] if (self._root / FOLDERS[DROPPED]).is_dir() else []
        return [TRAIN, *dropped, *sorted(self._eval_folders())]

    def steps(self, kind: str) -> list[int]:
        """Steps with a file, ascending."""
        folder = self._folder(kind)
        if not folder.is_dir():
            return []
        found = (FILE_NAME.fullmatch(entry.name) for entry in os.scandir(folder))
        return sorted(int(match[1]) for match in found if match)

    def rows(self, kind: str, step: int) -> list[SampleRow]:
        """All samples of a step, in the order of the file.

        Raises:
            NotInRun: there is no such file.
        """
        path = self._path(kind, step)
        return self._indexes.get(_key(path), lambda: self._read_index(path))

    def read(self, kind: str, step: int, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The whole rows, as `rollmill.sample_rows` names their columns.

        Raises:
            NotInRun: there is no such file or row.
        """
        path = self._path(kind, step)
        with pq.ParquetFile(path) as file:
            return [self._read_row(path, file, row) for row in rows]

    def _folder(self, kind: str) -> Path:
        if kind in FOLDERS:
            return self._root / FOLDERS[kind]
        folder = self._eval_folders().get(kind)
        if folder is None:
            raise NotInRun(f"there is no evaluation set {kind!r}")
        return folder

    def _eval_folders(self) -> dict[str, Path]:
        """Evaluation sets by kind; one with the name of another kind is told apart."""
        folder = self._root / "eval"
        names = [e.name for e in os.scandir(folder) if e.is_dir()] if folder.is_dir() else []
        return {f"eval/{name}" if name in FOLDERS else name: folder / name for name in names}

    def _path(self, kind: str, step: int) -> Path:
        path = self._folder(kind) / f"step_{step:06d}.parquet"
        if not path.is_file():
            raise NotInRun(f"there are no samples of step {step}")
        return path

    def _read_index(self, path: Path) -> tuple[list[SampleRow], int]:
        with pq.ParquetFile(path) as file:
            columns = [n for n in LIGHT_COLUMNS if n in file.schema_arrow.names]
            table = file.read(columns=[*columns, "segments.list.element.length"])
        texts = {"response": 4 * PREVIEW, "prompt_json": 64 * PREVIEW}
        for name, limit in texts.items():
            if name in columns:
                cut = pc.utf8_slice_codeunits(table[name], 0, limit)
                table = table.set_column(table.schema.get_field_index(name), name, cut)
        entries = table.to_pylist()
        return [self._row(i, entry) for i, entry in enumerate(entries)], max(1, len(entries))

    def _row(self, row: int, entry: Mapping[str, Any]) -> SampleRow:
        return SampleRow(
            row=row,
            index=entry.get("index", row),
            group=entry.get("group_index", 0),
            attempt=entry.get("attempt", 0),
            status=entry.get("status") or "",
            reward=self._reward(entry),
            outcome=entry.get("reward_outcome") or "",
            in_loss=entry.get("in_loss", True),
            length=sum(segment["length"] for segment in entry["segments"]),
            prompt=prompt_preview(entry.get("prompt_json")),
            response=preview(entry.get("response") or ""),
            decision=entry.get("decision") or "",
            reason=preview(entry.get("reason") or ""),
        )

    def _reward(self, entry: Mapping[str, Any]) -> float | None:
        return scalar_reward(entry, self._reward_key)

    def _read_row(self, path: Path, file: pq.ParquetFile, row: int) -> dict[str, Any]:
        start = 0
        for number in range(file.num_row_groups):
            size = file.metadata.row_group(number).num_rows
            if start <= row < start + size:
                table = self._row_group(path, file, number)
                (values,) = table.slice(row - start, 1).to_pylist()
                return {name: values.get(name) for name in table.schema.names}
            start += size
        raise NotInRun(f"there is no row {row} in {path.name}")

    def _row_group(self, path: Path, file: pq.ParquetFile, number: int) -> pa.Table:
        columns = [name for name in file.schema_arrow.names if name not in HEAVY_COLUMNS]

        def make() -> tuple[pa.Table, int]:
            table = file.read_row_group(number, columns=columns)
            return table, table.nbytes

        return self._row_groups.get((*_key(path), number), make)


def scalar_reward(entry: Mapping[str, Any], key: str | None) -> float | None:
    """The reward of a row as one finite number: the score, or the part that `key` names."""
    score = entry.get("score")
    if score is None:
        parts = parse_json(entry.get("reward_json"))
        score = parts.get(key) if isinstance(parts, dict) and key is not None else None
    if not isinstance(score, int | float) or not math.isfinite(score):
        return None
    return float(score)


def safe_name(text: str | None) -> str:
    """A short text of a row, clean."""
    return clean(text or "", 1000)


def _key(path: Path) -> FileKey:
    found = path.stat()
    return (str(path), found.st_mtime_ns, found.st_size)
