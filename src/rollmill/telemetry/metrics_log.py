"""`metrics.jsonl`: one line per record, appended and never rewritten, except by a resume.

Each line is a JSON object with `step`, `kind` (`train` or `eval`), `time` (seconds since the epoch)
and the figures. A full disk costs the record and one warning, not the run.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger(__name__)


class MetricsLog:
    """The writer.

    Args:
        path: the file; created when missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_warned = False
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append one record. Figures that are not finite are written as null."""
        figures = {
            name: (value if math.isfinite(value) else None)
            for name, value in sorted(metrics.items())
        }
        record = {"step": step, "kind": kind, "time": time.time(), **figures}
        try:
            with self._path.open("ab") as file:
                file.write(orjson.dumps(record) + b"\n")
        except OSError as error:
            if not self._has_warned:
                logger.warning("metrics cannot be written to %s: %s", self._path, error)
            self._has_warned = True

    def forget_after(self, step: int) -> None:
        """Drop the records of steps after `step`: a resume does them again."""
        if not self._path.exists():
            return
        kept = [orjson.dumps(r) + b"\n" for r in read_metrics(self._path) if r["step"] <= step]
        aside = self._path.with_suffix(".tmp")
        aside.write_bytes(b"".join(kept))
        os.replace(aside, self._path)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order; a line that was cut off at the end is skipped."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield orjson.loads(line)
