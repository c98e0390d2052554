"""Figures for TensorBoard, written by its own writer (which needs neither torch nor TensorFlow)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

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
        self._writer = Writer(str(folder))

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the finite figures of a record, on disk when this returns."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
