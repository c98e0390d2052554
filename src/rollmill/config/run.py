"""The run as a whole, and what it writes down."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rollmill.config.base import Section


class RunConfig(Section):
    """Where the run lives, how long it is and what it keeps."""

    dir: Path = Path("runs/default")
    """The run folder: config, metrics, samples, checkpoints, logs."""
    seed: int = 0
    """Seed of data order, sampling and initial values."""
    num_steps: int = Field(100, ge=1)
    """Training steps: one batch of rollouts each."""
    save_every: int = Field(10, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older checkpoints are deleted."""
    resume: bool = True
    """Go on from the newest checkpoint in the run folder."""


class TelemetryConfig(Section):
    """What is recorded besides `metrics.jsonl`."""

    dump_samples: bool = True
    """Write every trained sample to `samples/step_NNNNNN.parquet`."""
    console: bool = True
    """Live view in the terminal (plain lines when it is not a terminal)."""
    num_printed_samples: int = Field(0, ge=0)
    """Sample answers printed per evaluation."""
