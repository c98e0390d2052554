"""The run as a whole, and what it writes down."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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
    max_restarts: int = Field(3, ge=0)
    """Times that the run goes on from its newest checkpoint by itself after the trainer's process
    died; counted anew once a new step is done. 0 ends the run with the error."""
    stall_timeout_s: float | None = Field(300.0, gt=0)
    """When no request, judgement or answer has finished for this long while the run waits for
    rollouts, or an evaluation for its answers, say what blocks; so too when a trainer's step or a
    weight sync takes this long. null never does. See docs/async.md."""
    on_stall: Literal["warn", "retry", "stop"] = "warn"
    """What to do then besides: nothing; end what blocks, which counts as a failed try of its
    sample; or stop the run with the diagnosis as the error."""


class WandbConfig(Section):
    """Weights & Biases; needs `pip install "rollmill[wandb]"`."""

    mode: Literal["off", "offline", "online"] = "off"
    """`offline` keeps everything in the run folder (`wandb sync` sends it later); `online` sends it
    while the run goes on."""
    project: str = Field("rollmill", min_length=1)
    """The project there."""
    entity: str | None = None
    """The account or team; None is the logged-in account's own."""
    name: str | None = None
    """The run's name there; None is the name of the run folder."""
    tags: tuple[str, ...] = ()
    """Labels to find the run by."""


class TelemetryConfig(Section):
    """What is recorded besides `metrics.jsonl`."""

    dump_samples: bool = True
    """Write every trained sample to `samples/step_NNNNNN.parquet`, what the trainer made of it to
    `trained/`, and answers that were rejected or failed to `dropped/`."""
    max_dropped_samples: int = Field(256, ge=0)
    """Most samples per step in `dropped/`: whole groups, every reason its share."""
    console: bool = True
    """Live view in the terminal (plain lines when it is not a terminal)."""
    num_printed_samples: int = Field(0, ge=0)
    """Sample answers printed per evaluation."""
    trace: bool = True
    """Write where the time goes to `trace/step_NNNNNN.json` (for `rollmill view` and Perfetto)."""
    tensorboard: bool = False
    """Write the figures to `tensorboard/` too; needs `pip install "rollmill[tensorboard]"`."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Serve the newest figures at http://127.0.0.1:PORT/metrics for Prometheus; None: do not."""
