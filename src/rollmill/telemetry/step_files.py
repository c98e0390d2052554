"""Parquet files of a run, one per step: whole or not at all, and never worth a run.

Small row groups, so that a reader who wants one sample reads 64 and not all of them.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)
FILE_NAME = re.compile(r"step_(\d+)\.parquet")
ROW_GROUP_SIZE = 64


class StepFiles:
    """Writes `FOLDER/step_NNNNNN.parquet`.

    Args:
        folder: created when missing.
        what: how warnings call the rows.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder
        self._what = what
        self._has_warned = False

    def write(self, step: int, table: pyarrow.Table) -> Path:
        """Write the rows of a step; a full disk costs them, and one warning."""
        import pyarrow.parquet as pq

        path = self._folder / f"step_{step:06d}.parquet"
        aside = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, aside, row_group_size=ROW_GROUP_SIZE)
            os.replace(aside, path)
        except OSError as error:
            with suppress(OSError):  # half a file would fill the disk further
                aside.unlink(missing_ok=True)
            if not self._has_warned:
                logger.warning("%s cannot be written to %s: %s", self._what, path, error)
            self._has_warned = True
        return path

    def forget_after(self, step: int) -> None:
        """Delete the files of steps after `step`: a resume does them again."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            match = FILE_NAME.fullmatch(path.name)
            if match and int(match[1]) > step:
                path.unlink(missing_ok=True)
