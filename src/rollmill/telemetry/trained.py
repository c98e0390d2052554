"""What the trainer made of each sample, beside the samples: one Parquet file per step.

The samples of a step are written before it is trained; what only the trainer knows (its own
log-probs, the advantage) follows in a file of its own, joined by the sample's `index`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rollmill.sample import FloatArray
from rollmill.telemetry.step_files import StepFiles


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """The trainer's view of one sample.

    Attributes:
        index: the sample's number in the run.
        trainer_log_probs: float32, one per response token, under the weights before the step; not
            a number where the trainer did not score the token.
        advantage: mean over its trainable tokens; 0 without any.
    """

    index: int
    trainer_log_probs: FloatArray
    advantage: float

    @classmethod
    def from_wire(cls, report: Mapping[str, Any]) -> Self:
        """What the trainer sent about a sample: `index`, `advantage`, log-probs as raw float32."""
        log_probs = np.frombuffer(report["trainer_log_probs"], np.float32)
        return cls(report["index"], log_probs, report["advantage"])


class TrainedDump:
    """Writes `FOLDER/step_NNNNNN.parquet`.

    Args:
        folder: created when missing.
    """

    def __init__(self, folder: Path) -> None:
        self._files = StepFiles(folder, "trained samples")

    def write(self, step: int, samples: Iterable[TrainedSample]) -> Path:
        """Write a step, whole or not at all; a full disk costs one warning."""
        import pyarrow as pa

        rows = list(samples)
        columns = {
            "index": pa.array([row.index for row in rows], pa.int64()),
            "advantage": pa.array([row.advantage for row in rows], pa.float64()),
            "trainer_log_probs": pa.array(
                [row.trainer_log_probs for row in rows], pa.list_(pa.float32())
            ),
        }
        return self._files.write(step, pa.table(columns))

    def forget_after(self, step: int) -> None:
        """Delete the files of steps after `step`: a resume does them again."""
        self._files.forget_after(step)
