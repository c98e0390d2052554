"""Who uses a folder in shared memory: what a killed run left there is found, and nothing else.

A process claims its folder with a shared `flock` on the folder itself, which the system drops when
the process ends, however it ends. Whoever removes a folder takes the lock for itself alone first.
Invariants: a folder that somebody claims is never removed by others; a claim is always of the
folder that its path names.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

RUN_FOLDER = re.compile(r"rollmill-weights-[0-9a-f]{16}")
"""Names of the folders of runs."""


class Claim:
    """This process uses a folder, from `hold` to `release`.

    Args:
        folder: made by `hold`, for this user alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None

    def hold(self) -> None:
        """Make the folder when it is not there (any more), and claim it; again is allowed.

        Raises:
            OSError: it cannot be made or opened, is a link, or belongs to somebody else.
        """
        while self._descriptor is None or not _is_at(self._descriptor, self.folder):
            self.release()
            self.folder.mkdir(mode=0o700, exist_ok=True)
            try:
                self._descriptor = _open(self.folder)
            except FileNotFoundError:  # removed in between, before it was claimed
                continue
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # waits while somebody removes it
        if os.fstat(self._descriptor).st_uid != os.getuid():
            self.release()
            raise PermissionError(f"{self.folder} belongs to somebody else")

    def release(self) -> None:
        """Others may remove the folder from now on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def remove_unclaimed(place: Path) -> None:
    """Remove the folders of runs in `place` that nobody uses any more; other users' stay."""
    for folder in sorted(place.glob("rollmill-weights-*")):
        if RUN_FOLDER.fullmatch(folder.name) and remove_if_unclaimed(folder):
            logger.info("removed weights that a killed run had left: %s", folder)


def remove_if_unclaimed(folder: Path) -> bool:
    """Remove a folder of this user that nobody claims; whether it was removed."""
    try:
        descriptor = _open(folder)
    except OSError:  # not there, a link, or somebody else's
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(descriptor, folder):  # another removed it, and it was made anew
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(descriptor: int, folder: Path) -> bool:
    """Whether the open folder is the one that the path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except FileNotFoundError:
        return False
