"""Samples on disk: one Parquet file per step, readable with any Parquet tool."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollmill.sample import Sample
from rollmill.sample_rows import row_schema, row_to_sample, sample_to_row

logger = logging.getLogger(__name__)


class SampleDump:
    """Writes `FOLDER/step_NNNNNN.parquet`.

    Args:
        folder: created when missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def write(self, step: int, samples: Iterable[Sample]) -> Path:
        """Write the samples of a step, whole or not at all; a full disk costs one warning."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._folder / f"step_{step:06d}.parquet"
        aside = path.with_suffix(".tmp")
        rows = [sample_to_row(sample) for sample in samples]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows, schema=row_schema()), aside)
            os.replace(aside, path)
        except OSError as error:
            if not self._has_warned:
                logger.warning("samples cannot be written to %s: %s", path, error)
            self._has_warned = True
        return path


def read_samples(path: Path) -> Sequence[Sample]:
    """The samples of one file, exactly as they were."""
    import pyarrow.parquet as pq

    return [row_to_sample(row) for row in pq.read_table(path).to_pylist()]
