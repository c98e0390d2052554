"""What the trainer made of each sample, beside the samples: one Parquet file per step.

The samples of a step are written before it is trained; what only the trainer knows (its own
log-probs, the advantage) follows in a file of its own, joined by the sample's `index`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rollmill.sample import FloatArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """The trainer's view of one sample.

    Attributes:
        index: the sample's number in the run.
        trainer_log_probs: float32, one per response token, under the weights before the step; not
            a number where the trainer did not score the token.
        advantage: mean over its trainable tokens.
    """

    index: int
    trainer_log_probs: FloatArray
    advantage: float


class TrainedDump:
    """Writes `FOLDER/step_NNNNNN.parquet`.

    Args:
        folder: created when missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def write(self, step: int, samples: Iterable[TrainedSample]) -> Path:
        """Write a step, whole or not at all; a full disk costs one warning."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._folder / f"step_{step:06d}.parquet"
        aside = path.with_suffix(".tmp")
        rows = list(samples)
        columns = {
            "index": pa.array([row.index for row in rows], pa.int64()),
            "advantage": pa.array([row.advantage for row in rows], pa.float64()),
            "trainer_log_probs": pa.array(
                [row.trainer_log_probs for row in rows], pa.list_(pa.float32())
            ),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), aside, row_group_size=64)
            os.replace(aside, path)
        except OSError as error:
            if not self._has_warned:
                logger.warning("trained samples cannot be written to %s: %s", path, error)
            self._has_warned = True
        return path
