"""What the trainer wrote down about samples (`trained/step_NNNNNN.parquet`), looked up by index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq


def read_trained(root: Path, step: int, indices: list[int]) -> dict[int, dict[str, Any]]:
    """The trainer's rows of the samples with these indices; those it has none of are left out."""
    path = root / "trained" / f"step_{step:06d}.parquet"
    if not path.is_file():
        return {}
    table = pq.read_table(path, filters=pc.field("index").isin(indices))
    return {row["index"]: row for row in table.to_pylist()}
