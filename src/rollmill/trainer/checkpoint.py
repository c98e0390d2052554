"""Checkpoints that are whole or not there: written aside, checksummed, renamed.

A checkpoint is a folder `step_NNNNNN` with whatever files its owners put there and a
`manifest.json` that holds size and SHA-256 of each, and a SHA-256 of itself. It appears by a
rename, after every file has reached the disk. Invariant: `latest` never gives a checkpoint that
differs from what was committed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT_VERSION = 2

_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        step: the training step after which it was taken.
        path: its folder.
        info: what was given to `commit`.
    """

    step: int
    path: Path
    info: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they live; created when missing. What a killed run left unfinished there is
            removed.
        keep: how many to keep; older ones are deleted after each commit, and so are later ones: a
            run that commits a step before them went on from before them.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        self._clean_up()

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; invisible until `commit`."""
        path = self._unfinished(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def discard(self, step: int) -> None:
        """Remove what was written since `begin(step)`."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def commit(self, step: int, info: Mapping[str, Any]) -> Path:
        """Make what was written since `begin(step)` the checkpoint of `step`.

        Args:
            step: as given to `begin`.
            info: JSON values to find again in `Checkpoint.info`.

        Raises:
            CheckpointError: `begin` was not called.
        """
        written = self._unfinished(step)
        if not written.is_dir():
            raise CheckpointError(
                "there is nothing to commit", where=str(written), fix=f"call begin({step}) first"
            )
        _write_manifest(written, step, info)
        final = self._folder / f"step_{step:06d}"
        replaced = self._folder / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        written.rename(final)
        _sync_folder(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune(step)
        return final

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending, verified or not."""
        return _steps(self._folder)

    def latest(self) -> Checkpoint | None:
        """See `newest_checkpoint`."""
        return newest_checkpoint(self._folder)

    def _unfinished(self, step: int) -> Path:
        return self._folder / f"{_UNFINISHED}step_{step:06d}"

    def _clean_up(self) -> None:
        for path in self._folder.iterdir():
            if path.name.startswith(_REPLACED):
                final = self._folder / path.name.removeprefix(_REPLACED)
                if not final.exists():
                    path.rename(final)
                    continue
            if path.name.startswith((_UNFINISHED, _REPLACED)):
                logger.info("removing the unfinished checkpoint %s", path)
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Keep the last ones up to `newest`. A later one (damaged, since the run did not go on from
        it) must neither push out what is whole nor come back."""
        steps = self.steps()
        later = [step for step in steps if step > newest]
        for step in later:
            logger.warning("removing checkpoint step_%06d: the run went on from before it", step)
        for step in [step for step in steps if step <= newest][: -self._keep] + later:
            shutil.rmtree(self._folder / f"step_{step:06d}", ignore_errors=True)


def newest_checkpoint(folder: Path, *, at_most: int | None = None) -> Checkpoint | None:
    """The newest checkpoint whose every file is as committed; None when there is none at all.

    A damaged one is reported in the log, with the reason, and the one before is taken. Nothing is
    changed: a run may be working in the folder.

    Args:
        folder: of a run's checkpoints.
        at_most: the last step to look at; None looks at all.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
    """
    reasons = []
    for step in reversed([s for s in _steps(folder) if at_most is None or s <= at_most]):
        path = folder / f"step_{step:06d}"
        try:
            return _verified(path, step)
        except CheckpointError as error:
            logger.warning("checkpoint %s is damaged and not used: %s", path, error)
            reasons.append(f"{path.name}: {error.found or error.what}")
    if reasons:
        raise CheckpointError(
            "every checkpoint is damaged",
            where=str(folder),
            expected="at least one whole checkpoint",
            found="; ".join(reasons),
            fix="restore one from a backup, use the version of rollmill that wrote them, or start "
            "a new run folder",
        )
    return None


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match.group(1)) for match in names if match)


def _write_manifest(folder: Path, step: int, info: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = {
                "size": path.stat().st_size,
                "sha256": _sha256(path),
            }
            _sync_file(path)
    content = {"format": FORMAT_VERSION, "step": step, "info": dict(info), "files": files}
    content["sha256"] = _content_sha256(json.loads(json.dumps(content)))
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(content, indent=2))
    _sync_file(manifest)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync_folder(path)


def _verified(folder: Path, step: int) -> Checkpoint:
    manifest = folder / MANIFEST
    try:
        content = json.loads(manifest.read_text())
        format_version, is_this_step = content["format"], content["step"] == step
        is_intact = content.pop("sha256", None) == _content_sha256(content)
        info, files = content["info"], content["files"]
        entries = [(folder / name, int(e["size"]), str(e["sha256"])) for name, e in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(manifest, f"no usable manifest ({type(error).__name__})") from error
    if format_version != FORMAT_VERSION:
        found = f"format {format_version}, and this version of rollmill reads {FORMAT_VERSION}"
        raise _damaged(manifest, found)
    if not is_this_step:
        raise _damaged(manifest, "a manifest of another step")
    if not is_intact:
        raise _damaged(manifest, "another checksum")
    for path, size, digest in entries:
        if not path.is_file():
            raise _damaged(path, "the file is missing")
        if path.stat().st_size != size:
            raise _damaged(path, f"{path.stat().st_size} bytes instead of {size}")
        if _sha256(path) != digest:
            raise _damaged(path, "another checksum")
    return Checkpoint(step=step, path=folder, info=info)


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "a checkpoint is damaged",
        where=str(path),
        expected="the files that were committed",
        found=f"{path.name}: {found}",
    )


def _content_sha256(content: Mapping[str, Any]) -> str:
    """Of a manifest's content, whatever its layout as text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
