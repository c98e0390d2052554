"""Moving weights through a folder that trainer and engines share.

One sync: the trainer writes a folder of its own for this version; generation is held; every engine
loads the folder and confirms the version; generation goes on. Invariants: generation goes on
whether or not the update worked; on failure the engines keep serving the old version, whose
folder is still there for engines that come back; at most two versions lie on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any, Protocol

from rollmill.config.weights import WeightsConfig
from rollmill.engine.client import PauseMode
from rollmill.errors import EngineError, TrainerError

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
UNKNOWN_SIZE_BYTES = 4 << 30
"""Room asked for while nobody has said how large the weights are."""
NUM_VERSIONS_KEPT = 2


class Trainer(Protocol):
    """What a sync needs of the trainer."""

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Run a method of the trainer in its process."""


class Engines(Protocol):
    """What a sync needs of the engines; `EnginePool` is one."""

    async def pause_all(self, mode: PauseMode) -> None:
        """Hold generation."""

    async def resume_all(self) -> None:
        """Go on."""

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""

    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        """Load and confirm."""

    async def checksums(self) -> dict[str, str]:
        """Checksum of the weights by engine."""


class DiskTransport:
    """Weight sync through safetensors in a folder.

    Args:
        config: where, and what running requests do meanwhile.
        run_dir: the run's folder; names the sync folder and is its place when memory is short.
        dtype: precision that the engines serve.
        num_bytes: size of the weights in that precision, when known.
    """

    def __init__(
        self, config: WeightsConfig, run_dir: Path, *, dtype: str, num_bytes: int | None = None
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._dtype = dtype
        self._num_bytes = num_bytes
        self._folder: Path | None = None
        self._served: Path | None = None

    async def sync(self, trainer: Trainer, pool: Engines, version: int) -> dict[str, float]:
        """Bring the trainer's weights to every engine, as `version`.

        Returns:
            Metrics: `weights/write_s`, `weights/pause_s` (how long generation was held),
            `weights/update_s`, `weights/num_bytes`, and where known `weights/changed_share` and
            `weights/verify_s`.

        Raises:
            TrainerError: the weights could not be written.
            EngineError: no engine took them, and the old ones are still served; or the engines'
                checksums differ.
        """
        started = time.monotonic()
        target = self._new_folder(version)
        try:
            written = await self._write(trainer, target)
            write_s = time.monotonic() - started
            timing = await self._install(pool, target, version)
        finally:
            await self._remove_all_but_served()
        verification = await self._verify(pool) if self._config.verify_checksum else {}
        return {"weights/write_s": write_s, **timing, **verification, **_write_metrics(written)}

    async def close(self) -> None:
        """Remove everything from the shared folder. Call when no engine may come back any more."""
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._folder = self._served = None

    async def _write(self, trainer: Trainer, target: Path) -> dict[str, Any]:
        written: dict[str, Any] = await trainer.call(
            "write_weights", path=str(target), dtype=self._dtype
        )
        if not any(target.glob("*.safetensors")):
            raise TrainerError(
                "the trainer wrote no weights",
                where=str(target),
                expected="safetensors files",
                found=", ".join(sorted(os.listdir(target))) or "an empty folder",
            )
        self._num_bytes = int(written.get("num_bytes", 0)) or self._num_bytes
        return written

    async def _install(self, pool: Engines, target: Path, version: int) -> dict[str, float]:
        """Pause, flush, update, continue; the last whatever happens."""
        paused = time.monotonic()
        keeps_cache = self._config.pause_mode == "in_place"
        try:
            await pool.pause_all(self._config.pause_mode)
            if not keeps_cache:
                await pool.flush_cache()
            begun = time.monotonic()
            await pool.update_weights(str(target), version, flush_cache=not keeps_cache)
            update_s = time.monotonic() - begun
            self._served = target
        finally:
            await self._resume(pool)
        return {"weights/pause_s": time.monotonic() - paused, "weights/update_s": update_s}

    async def _verify(self, pool: Engines) -> dict[str, float]:
        """Compare the engines' weights with each other, while generation goes on."""
        started = time.monotonic()
        checksums = await pool.checksums()
        if len(set(checksums.values())) > 1:
            raise EngineError(
                "the engines serve different weights under one version",
                where="weights.verify_checksum",
                expected="one checksum on all engines of one kind",
                found=", ".join(f"{url}: {total}" for url, total in sorted(checksums.items())),
            )
        return {"weights/verify_s": time.monotonic() - started}

    async def _resume(self, pool: Engines) -> None:
        """Go on; a cancelled sync waits for it too."""
        resume = asyncio.ensure_future(pool.resume_all())
        try:
            await asyncio.shield(resume)
        except asyncio.CancelledError:
            await asyncio.gather(resume, return_exceptions=True)
            raise

    async def _remove_all_but_served(self) -> None:
        """The version before, or the one that did not get to the engines."""
        if self._folder is not None and self._folder.is_dir():
            unused = [folder for folder in self._folder.iterdir() if folder != self._served]
            await asyncio.to_thread(_remove, unused)

    def _new_folder(self, version: int) -> Path:
        """A fresh, empty folder for this version."""
        base = self._base_folder()
        target = base / f"version_{version:08d}"
        attempt = 0
        while target.exists():  # the same version again, after a failure or by wish
            attempt += 1
            target = base / f"version_{version:08d}_{attempt}"
        target.mkdir()
        return target

    def _base_folder(self) -> Path:
        """This run's own folder in the shared place; leftovers of a killed run are removed."""
        if self._folder is None:
            digest = hashlib.sha256(str(self._run_dir.resolve()).encode()).hexdigest()[:16]
            name = f"rollmill-weights-{digest}"
            _remove([place / name for place in (SHARED_MEMORY, self._run_place())])
            self._folder = self._shared_place() / name
            _remove([self._folder])
        _make_private(self._folder)  # each time: a cleaner of temporary files may have passed
        return self._folder

    def _run_place(self) -> Path:
        return self._run_dir / "weights"

    def _shared_place(self) -> Path:
        if self._config.dir is not None:
            place = Path(self._config.dir)
            place.mkdir(parents=True, exist_ok=True)
            return place
        needed = NUM_VERSIONS_KEPT * (self._num_bytes or UNKNOWN_SIZE_BYTES // NUM_VERSIONS_KEPT)
        if _has_room(SHARED_MEMORY, needed):
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


def _write_metrics(written: dict[str, Any]) -> dict[str, float]:
    known = {name: written.get(name) for name in ("num_bytes", "changed_share")}
    return {f"weights/{name}": float(value) for name, value in known.items() if value is not None}
