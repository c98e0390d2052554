"""Figures for Weights & Biases: kept in the run folder, or sent there, as the configuration says.

Steps are a figure of their own (`step`), so that a training record and an evaluation of one step
are never refused for coming late. A resumed run goes on under the id it began with. What was told
once cannot be taken back there, so a step that is done again after a resume is not told again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rollmill.config.run import WandbConfig
from rollmill.errors import ConfigError

logger = logging.getLogger(__name__)
STATE_FILE = "wandb_run.json"


@dataclass
class WandbState:
    """What was told so far, kept in the run folder.

    Attributes:
        id: the run's id there.
        num_records: records told; numbers the next one, also in another process.
        last_steps: the highest step told, by kind of record.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(4))
    num_records: int = 0
    last_steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The state of a run that began before, or a new one."""
        if not path.is_file():
            return cls()
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Keep it."""
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(aside, path)


class WandbTracker:
    """Tells Weights & Biases.

    Args:
        settings: the `telemetry.wandb` section; `mode` is not `off`.
        run_dir: the run folder.
        config: the run's whole configuration.

    Raises:
        ConfigError: the package is not installed, or the run cannot be opened there.
    """

    name = "Weights & Biases"

    def __init__(self, settings: WandbConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "Weights & Biases is not installed",
                where="telemetry.wandb.mode",
                found=str(error),
                fix='pip install "rollmill[wandb]", or set telemetry.wandb.mode=off',
            ) from None
        run_dir.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._settings = settings
        self._run_dir = run_dir
        self._config = dict(config)
        self._state = WandbState.read(run_dir / STATE_FILE)
        self._run = self._open()

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite figures of a record, unless this step was told before."""
        if step <= self._state.last_steps.get(kind, -1):
            return
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._run.log({**finite, "step": step}, step=self._state.num_records, commit=True)
        self._state.num_records += 1
        self._state.last_steps[kind] = step
        self._state.write(self._run_dir / STATE_FILE)

    def forget_after(self, step: int) -> None:
        """A run that begins anew in the same folder is another run there."""
        if step < 0 and self._state.num_records:
            self._run.finish()
            self._state = WandbState()
            self._run = self._open()

    def close(self) -> None:
        """Write (or send) the rest."""
        self._run.finish()

    def _open(self) -> Any:
        wandb, settings, run_dir = self._wandb, self._settings, self._run_dir
        # Nothing but what we say is recorded: no console, code, git state or machine figures.
        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        try:
            run = wandb.init(
                mode="offline" if settings.mode == "offline" else "online",
                project=settings.project,
                entity=settings.entity,
                name=settings.name or run_dir.name,
                tags=list(settings.tags),
                dir=str(run_dir),
                id=self._state.id,
                resume="allow" if settings.mode == "online" else None,
                config=self._config,
                settings=quiet,
            )
        except wandb.Error as error:
            raise ConfigError(
                "the Weights & Biases run cannot be opened",
                where="telemetry.wandb",
                found=str(error),
                fix="log in with `wandb login`, or set telemetry.wandb.mode=offline",
            ) from None
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run
