"""The folder that trainer and engines share, with one folder per version in it.

Invariants: it belongs to this run and to this user alone; at most two versions lie in it, the one
that is served and the one on its way; what a killed run left is removed, in shared memory by the
next run of this user (`claims`). When shared memory turns out to be full, later versions go to the
run's folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import stat
from pathlib import Path

from rollmill.config.weights import WeightsConfig
from rollmill.errors import EngineError, TrainerError
from rollmill.weights.claims import Claim, remove_unclaimed

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
UNKNOWN_SIZE_BYTES = 4 << 30
"""Room asked for while nobody has said how large the weights are."""
NUM_VERSIONS_KEPT = 2


class WeightsNotWritten(TrainerError):
    """The trainer could not write weights where engines read them: the disk is full, say."""

    @classmethod
    def to(cls, path: Path, why: str) -> WeightsNotWritten:
        """The error of writing to `path`."""
        return cls(
            "the weights could not be written",
            where=str(path),
            found=why,
            fix="make room there for two versions of the weights, or set weights.dir to a folder "
            "that has it; the run goes on from its last checkpoint",
        )


class SharedFolder:
    """Folders for versions of the weights.

    Args:
        config: where.
        run_dir: the run's folder; names the shared folder and is its place when memory is short.
        num_bytes: size of one version, when known.
    """

    def __init__(self, config: WeightsConfig, run_dir: Path, *, num_bytes: int | None) -> None:
        self.num_bytes = num_bytes
        self._config = config
        self._run_dir = run_dir
        self._folder: Path | None = None
        self._left: list[Path] = []
        self._claims: dict[Path, Claim] = {}
        self._is_memory_full = False

    def new(self, version: int) -> Path:
        """A fresh, empty folder for this version."""
        base = self._base_folder()
        target = base / f"version_{version:08d}"
        attempt = 0
        while target.exists():  # the same version again, after a failure or by wish
            attempt += 1
            target = base / f"version_{version:08d}_{attempt}"
        target.mkdir()
        return target

    async def remove_all_but(self, served: Path | None) -> None:
        """Remove every version but the one that is served."""
        for folder in self._folders():
            if folder.is_dir():
                unused = [version for version in folder.iterdir() if version != served]
                await asyncio.to_thread(_remove, unused)

    def leave_shared_memory(self) -> bool:
        """It is full: new versions go to the run's folder. False when they were not in memory, or
        `weights.dir` says where they have to be.

        The version that is served stays where it is.
        """
        if self._folder is None or self._config.dir or not _is_in_memory(self._folder):
            return False
        self._left.append(self._folder)
        self._folder = None
        self._is_memory_full = True
        return True

    async def close(self) -> None:
        """Remove everything."""
        for folder in self._folders():
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        for claim in self._claims.values():
            claim.release()
        self._folder, self._left, self._claims = None, [], {}

    def _folders(self) -> list[Path]:
        return [*self._left, *([self._folder] if self._folder else [])]

    def _base_folder(self) -> Path:
        """This run's own folder in the shared place; leftovers of a killed run are removed."""
        if self._folder is None:
            digest = hashlib.sha256(str(self._run_dir.resolve()).encode()).hexdigest()[:16]
            name = f"rollmill-weights-{digest}"
            remove_unclaimed(SHARED_MEMORY)
            _remove([self._run_place() / name])
            self._folder = self._shared_place() / name
            if _is_in_memory(self._folder):
                self._claims[self._folder] = Claim(self._folder)
            else:
                _remove([self._folder])
        # each time: a cleaner of temporary files may have passed
        _make_private(self._folder)
        if self._folder in self._claims:
            self._claims[self._folder].hold()
        return self._folder

    def _run_place(self) -> Path:
        return self._run_dir / "weights"

    def _shared_place(self) -> Path:
        if self._config.dir is not None:
            place = Path(self._config.dir)
            place.mkdir(parents=True, exist_ok=True)
            return place
        needed = NUM_VERSIONS_KEPT * (self.num_bytes or UNKNOWN_SIZE_BYTES // NUM_VERSIONS_KEPT)
        if not self._is_memory_full and _has_room(SHARED_MEMORY, needed):
            return SHARED_MEMORY
        place = self._run_place()
        place.mkdir(parents=True, exist_ok=True)
        logger.info("no room for %d bytes in %s: weights go to %s", needed, SHARED_MEMORY, place)
        return place


def _remove(folders: list[Path]) -> None:
    """Remove folders; one that cannot be removed is left with a warning."""
    for folder in folders:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                logger.warning("could not remove old weights: %s", folder)


def _is_in_memory(folder: Path) -> bool:
    return folder.parent.resolve() == SHARED_MEMORY.resolve()


def _has_room(place: Path, num_bytes: int) -> bool:
    if not (place.is_dir() and os.access(place, os.W_OK)):
        return False
    return shutil.disk_usage(place).free >= num_bytes


def _make_private(folder: Path) -> None:
    """A folder that only this user can enter: shared memory is open to everybody.

    Raises:
        EngineError: somebody else made the folder, or it is a link.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise EngineError(
            "the folder for weights belongs to somebody else",
            where=str(folder),
            fix="set weights.dir to a folder of your own",
        )
    folder.chmod(0o700)
