"""Figures for TensorBoard, written by its own writer (which needs neither torch nor TensorFlow)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError


class TensorBoardTracker:
    """Writes event files.

    Args:
        folder: created when missing.

    Raises:
        ConfigError: the package is not installed.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer  # type: ignore[import-not-found, import-untyped, unused-ignore]  # fmt: skip
        except ImportError as error:
            raise ConfigError(
                "TensorBoard is not installed",
                where="telemetry.tensorboard",
                found=str(error),
                fix='pip install "rollmill[tensorboard]", or set telemetry.tensorboard=false',
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._make_writer: Any = Writer
        self._writer: Any = None

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the finite figures of a record, on disk when this returns."""
        self._writer = self._writer or self._make_writer(str(self._folder))
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def forget_after(self, step: int) -> None:
        """Have TensorBoard leave out what earlier event files say of later steps.

        TensorBoard drops the events from the step on at which a session starts, from the second
        session on; so every session says where it starts. Event files are read in the order in
        which they were begun, so the mark gets one of its own, before ours.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-not-found, import-untyped, unused-ignore]  # fmt: skip
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-not-found, import-untyped, unused-ignore]  # fmt: skip

        started = SessionLog(status=SessionLog.START)
        mark = EventFileWriter(str(self._folder))
        mark.add_event(Event(wall_time=time.time(), step=step + 1, session_log=started))
        mark.close()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
