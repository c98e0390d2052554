"""What a folder of recorded answers says about itself: every model by its hash, every file by its.

The manifest is written when a preparation starts (not complete) and when all shards are there.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from rollmill.config.opd import Mismatch
from rollmill.distill.identity import TokenizerIdentity
from rollmill.errors import DataError

FORMAT = 1
FILE_NAME = "manifest.json"


class ShardEntry(msgspec.Struct, frozen=True):
    """One shard file.

    Attributes:
        name: file name in the folder.
        sha256: of the whole file.
        num_rows: answers in it.
        generated_tokens: response tokens sampled.
        teacher_tokens: response tokens that the teacher scored.
        student_tokens: response tokens that the student scored again.
        seconds: by phase: `generate`, `teacher`, `student`.
    """

    name: str
    sha256: str
    num_rows: int
    generated_tokens: int
    teacher_tokens: int
    student_tokens: int
    seconds: dict[str, float]


class Settings(msgspec.Struct, frozen=True):
    """All that decides what the rows are: two preparations with equal settings draw equal answers.

    Attributes:
        student: hash of the sampled weights.
        teachers: hash of each teacher's weights by name (`""` for the one without a name).
        sft_teacher: hash of the model that wrote the SFT data; None when nobody said.
        tokenizer: hashes of the student's tokenizer.
        sampling: the sampling parameters, temperature and top-p among them.
        dtypes: precision of the engines started here (`student`, `teacher`); `external` elsewhere.
        seed: the run's.
        num_prompts: prompts answered.
        samples_per_prompt: answers to each.
        prompts_per_shard: prompts in one file.
        prompts: hash over all prompts in order: tokens, labels, metadata.
        context_length: most tokens of prompt and response together.
        allowed: kinds of differences (`opd.allow_mismatch`) that were found and allowed; training
            has to allow them too.
    """

    student: str
    teachers: dict[str, str]
    sft_teacher: str | None
    tokenizer: TokenizerIdentity
    sampling: dict[str, Any]
    dtypes: dict[str, str]
    seed: int
    num_prompts: int
    samples_per_prompt: int
    prompts_per_shard: int
    prompts: str
    context_length: int
    allowed: tuple[Mismatch, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:32]


class Manifest(msgspec.Struct, frozen=True):
    """`manifest.json`.

    Attributes:
        settings: what decides the rows.
        code_version: version of rollmill that wrote it.
        is_complete: whether every shard is there.
        shards: the files.
        seconds: by phase, over all shards.
        generated_tokens: over all shards; the others likewise.
    """

    settings: Settings
    code_version: str
    is_complete: bool
    shards: tuple[ShardEntry, ...] = ()
    seconds: dict[str, float] = {}
    generated_tokens: int = 0
    teacher_tokens: int = 0
    student_tokens: int = 0
    format: int = FORMAT

    def finished(self, shards: tuple[ShardEntry, ...]) -> Manifest:
        """The same with all shards, and their sums."""
        phases = sorted({phase for shard in shards for phase in shard.seconds})
        return msgspec.structs.replace(
            self,
            is_complete=True,
            shards=shards,
            seconds={phase: sum(s.seconds.get(phase, 0.0) for s in shards) for phase in phases},
            generated_tokens=sum(s.generated_tokens for s in shards),
            teacher_tokens=sum(s.teacher_tokens for s in shards),
            student_tokens=sum(s.student_tokens for s in shards),
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    aside = folder / f"{FILE_NAME}.tmp"
    with aside.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, folder / FILE_NAME)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        DataError: it is missing, of another format, or cannot be read.
    """
    path = folder / FILE_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            "the manifest of the recorded answers cannot be read",
            where=str(path),
            expected="the file that `rollmill distill prepare` writes",
            found=str(error),
            fix="run `rollmill distill prepare`, or correct opd.data",
        ) from error
    if manifest.format != FORMAT:
        raise DataError(
            "the recorded answers are of another format",
            where=str(path),
            expected=f"format {FORMAT}",
            found=str(manifest.format),
            fix="prepare them again",
        )
    return manifest
