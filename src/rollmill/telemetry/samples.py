"""Samples on disk: one Parquet file per step, readable with any Parquet tool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rollmill.sample import Sample
from rollmill.sample_rows import row_schema, row_to_sample, sample_to_row
from rollmill.telemetry.step_files import StepFiles


class SampleDump:
    """Writes `FOLDER/step_NNNNNN.parquet`.

    Args:
        folder: created when missing.
    """

    def __init__(self, folder: Path) -> None:
        self._files = StepFiles(folder, "samples")

    def write(self, step: int, samples: Iterable[Sample]) -> Path:
        """Write the samples of a step, whole or not at all; a full disk costs one warning."""
        import pyarrow as pa

        rows = [sample_to_row(sample) for sample in samples]
        return self._files.write(step, pa.Table.from_pylist(rows, schema=row_schema()))

    def forget_after(self, step: int) -> None:
        """Delete the files of steps after `step`: a resume does them again."""
        self._files.forget_after(step)


def read_samples(path: Path) -> Sequence[Sample]:
    """The samples of one file, exactly as they were."""
    import pyarrow.parquet as pq

    return [row_to_sample(row) for row in pq.read_table(path).to_pylist()]
