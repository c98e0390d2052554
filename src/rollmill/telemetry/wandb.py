"""Figures for Weights & Biases: kept in the run folder, or sent there, as the configuration says.

Steps are a figure of their own (`step`), so that a training record and an evaluation of one step,
or a step done again after a resume, are never refused for coming late. A resumed run goes on under
the id it began with.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.config.run import WandbConfig
from rollmill.errors import ConfigError

logger = logging.getLogger(__name__)
ID_FILE = "wandb_run_id"


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
            self._run = wandb.init(
                mode="offline" if settings.mode == "offline" else "online",
                project=settings.project,
                entity=settings.entity,
                name=settings.name or run_dir.name,
                tags=list(settings.tags),
                dir=str(run_dir),
                id=_run_id(run_dir / ID_FILE),
                resume="allow" if settings.mode == "online" else None,
                config=dict(config),
                settings=quiet,
            )
        except wandb.Error as error:
            raise ConfigError(
                "the Weights & Biases run cannot be opened",
                where="telemetry.wandb",
                found=str(error),
                fix="log in with `wandb login`, or set telemetry.wandb.mode=offline",
            ) from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite figures of a record."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._run.log({**finite, "step": step})

    def close(self) -> None:
        """Write (or send) the rest."""
        self._run.finish()


def _run_id(path: Path) -> str:
    """The id that the run began with, or a new one, kept in the run folder."""
    if path.is_file():
        return path.read_text(encoding="ascii").strip()
    name = secrets.token_hex(4)
    path.write_text(f"{name}\n", encoding="ascii")
    return name
