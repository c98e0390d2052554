"""Reading recorded answers: everything is looked at before anything is used.

`open_recorded` looks at everything before the first step: the manifest against the run, every file
against the manifest, every row against itself. What it cannot vouch for it refuses by file and row.

All rows stay in memory as Arrow tables (about 16 bytes per response token).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill.config.opd import Mismatch, OpdConfig
from rollmill.config.sampling import SamplingConfig
from rollmill.data.template import Tokenizer
from rollmill.distill.checks import Refusals, RowLimits
from rollmill.distill.manifest import FILE_NAME, Manifest, ShardEntry, read_manifest
from rollmill.distill.mismatch import StartOfRun, mismatches, refuse, sampling_differences
from rollmill.distill.prepare import gap_problem
from rollmill.distill.released import (
    COLUMNS,
    UNKNOWN,
    encode_prompt,
    problems_of_released,
    row_of_released,
)
from rollmill.distill.rows import RecordedRow, row_of
from rollmill.distill.shards import check_shard, file_hash, read_table, records_of
from rollmill.errors import DataError
from rollmill.sample import FloatArray

if TYPE_CHECKING:
    import pyarrow

REFUSED = "recorded answers cannot be used"
PREPARE_AGAIN = "prepare again: only files with such rows are done again"
TAKE_OUT = "take the rows out of the file, or make it again"


@dataclass(frozen=True)
class Place:
    """One row: file and number, and how to read it."""

    file: str
    number: int
    read: Callable[[], RecordedRow] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Recording:
    """All recorded answers of a run, checked.

    Attributes:
        groups: per group, its rows.
        allowed: the mismatches that were found and that the configuration allows.
        manifest: None for files of the released layout.
        fingerprint: a hash over the contents of all files, in order.
    """

    groups: tuple[tuple[Place, ...], ...]
    allowed: tuple[Mismatch, ...]
    manifest: Manifest | None
    fingerprint: str

    @property
    def places(self) -> list[Place]:
        """All rows, in order."""
        return [place for group in self.groups for place in group]


def open_recorded(
    opd: OpdConfig,
    *,
    start: StartOfRun,
    tokenizer: Tokenizer,
    limits: RowLimits,
    samples_per_prompt: int,
    end_ids: Sequence[int],
) -> Recording:
    """Read and check the recorded answers that `opd.data` names.

    Args:
        opd: the `opd` section, with `data` and the allowed mismatches.
        start: the weights and tokenizer that training starts from.
        tokenizer: that tokenizer, for prompts of the released layout.
        limits: what rows are checked against.
        samples_per_prompt: answers in each group.
        end_ids: tokens that end an answer.

    Raises:
        ConfigError: the answers do not fit the run, and the difference is not allowed.
        DataError: there are none, or files or rows cannot be used; every one is named.
    """
    path = opd.data
    if path is None:
        raise ValueError("opd.data is needed")
    limits = RowLimits(limits.vocab_size, limits.context_length, "sampling" in opd.allow_mismatch)
    if not path.is_dir() or not (path / FILE_NAME).exists():
        found = refuse(UNKNOWN, opd.allow_mismatch, where=f"opd.data: {path}")
        files = _released_files(path)
        places = _released_places(files, tokenizer, limits, end_ids)
        groups = _grouped(places, [(n,) for n in range(len(places))], samples_per_prompt, path)
        return Recording(groups, tuple(found), None, _hash_of(map(file_hash, files)))
    manifest = _complete_manifest(path)
    settings = manifest.settings
    differences = mismatches(settings, start)
    differences += sampling_differences(SamplingConfig.model_validate(settings.sampling))
    allowed = refuse(differences, opd.allow_mismatch, where=f"opd.data: {path}")
    places = _shard_places(path, manifest, limits)
    keys = [(number // settings.samples_per_prompt,) for number in range(len(places))]
    groups = _grouped(places, keys, samples_per_prompt, path)
    fingerprint = _hash_of(shard.sha256 for shard in manifest.shards)
    return Recording(groups, tuple(allowed), manifest, fingerprint)


def _hash_of(hashes: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:32]


def _complete_manifest(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    if not manifest.is_complete:
        raise DataError(
            "the preparation of the recorded answers did not finish",
            where=str(folder / FILE_NAME),
            expected="is_complete: true",
            found="false",
            fix="run `rollmill distill prepare` again: finished shards are kept",
        )
    return manifest


def _shard_places(folder: Path, manifest: Manifest, limits: RowLimits) -> list[Place]:
    """All rows of all shards; first every row that is wrong is named, then a file that is."""
    refusals = Refusals()
    places: list[Place] = []
    changed: list[DataError] = []
    for shard in manifest.shards:
        path = folder / shard.name
        table = read_table(path)
        num_rows, _ = check_shard(table, path, limits, refusals)
        found = file_hash(path)
        if num_rows != shard.num_rows or found != shard.sha256:
            changed.append(_changed_file(path, shard, f"{num_rows} rows, SHA-256 {found}"))
        places += [Place(shard.name, number, _reader(table, number)) for number in range(num_rows)]
    refusals.raise_any(REFUSED, fix=PREPARE_AGAIN)
    if changed:
        raise changed[0]
    return places


def _changed_file(path: Path, shard: ShardEntry, found: str) -> DataError:
    return DataError(
        "a file of recorded answers is not the one that was prepared",
        where=str(path),
        expected=f"{shard.num_rows} rows, SHA-256 {shard.sha256}",
        found=found,
        fix="delete it and prepare again: only what is missing is done",
    )


def _reader(table: pyarrow.Table, number: int) -> Callable[[], RecordedRow]:
    return lambda: row_of(records_of(table, number))


def _released_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(
            "there are no recorded answers",
            where=f"opd.data: {path}",
            expected="a folder that `rollmill distill prepare` wrote, or a Parquet file",
            found="no Parquet file",
            fix="run `rollmill distill prepare`, or correct opd.data",
        )
    return files


def _released_places(
    files: Sequence[Path], tokenizer: Tokenizer, limits: RowLimits, end_ids: Sequence[int]
) -> list[Place]:
    refusals = Refusals()
    places = []
    for file in files:
        table = read_table(file)
        missing = set(COLUMNS) - set(table.schema.names)
        if missing:
            raise DataError(
                "a file of recorded answers has other columns",
                where=str(file),
                expected=f"{', '.join(COLUMNS)}, label; or a folder with {FILE_NAME}",
                found=", ".join(table.schema.names),
            )
        for number in range(table.num_rows):
            record = records_of(table, number)
            prompt = encode_prompt(record["prompt"], tokenizer)
            refusals.add(file.name, number, problems_of_released(record, prompt, limits))
            read = _released_reader(table, number, prompt, end_ids)
            places.append(Place(file.name, number, read))
    refusals.raise_any(REFUSED, fix=TAKE_OUT)
    return places


def _released_reader(
    table: pyarrow.Table, number: int, prompt: list[int], end_ids: Sequence[int]
) -> Callable[[], RecordedRow]:
    return lambda: row_of_released(records_of(table, number), number, prompt, end_ids)


def _grouped(
    places: Sequence[Place], keys: Sequence[Any], size: int, path: Path
) -> tuple[tuple[Place, ...], ...]:
    """Rows with one key together; each group has `size` rows."""
    groups: dict[Any, list[Place]] = {}
    for place, key in zip(places, keys, strict=True):
        groups.setdefault(key, []).append(place)
    odd = next((members for members in groups.values() if len(members) != size), None)
    if odd is not None or not groups:
        raise DataError(
            "the recorded answers do not make groups of the configured size",
            where=f"opd.data: {path}",
            expected=f"{size} answers to each prompt (rollout.n_samples_per_prompt)",
            found=f"{len(odd)} at {odd[0]}" if odd else "no answers",
            fix="set rollout.n_samples_per_prompt to the number of recorded answers to a prompt",
        )
    return tuple(tuple(members) for members in groups.values())


def check_scores(
    places: Sequence[Place], scores: Sequence[FloatArray], *, tolerance: float
) -> None:
    """Raise DataError when rows that the trainer scored anew were recorded differently.

    Args:
        places: the rows.
        scores: per row, float32 [R], under the starting weights at temperature 1.
        tolerance: largest mean |Δ| over a row's tokens.
    """
    refusals = Refusals()
    for place, values in zip(places, scores, strict=True):
        problem = gap_problem(place.read().student_log_probs, values, tolerance)
        refusals.add(place.file, place.number, problem)
    refusals.raise_any(
        "recorded log-probs of the student are not those of the starting weights",
        fix="train from the model that was sampled; for low precision raise opd.score_tolerance, "
        "or set opd.allow_mismatch: [scores]",
    )
