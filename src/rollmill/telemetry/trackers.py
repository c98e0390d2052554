"""Where figures go besides `metrics.jsonl`: TensorBoard, Weights & Biases, Prometheus.

A tracker is told each record as it is written. None of them can stop a run: the first failure of a
tracker is one warning, and it is not called again. What is missing or wrong from the start (a
package, a port in use) is an error before the run begins, with what to do about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rollmill.config.run import TelemetryConfig

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Something that wants the figures of a run."""

    @property
    def name(self) -> str:
        """How warnings call it."""

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Take one record: `kind` is `train` or `eval`. Figures may be infinite or no number."""

    def forget_after(self, step: int) -> None:
        """The run goes on after `step` (-1: it begins anew): later steps will be told again."""

    def close(self) -> None:
        """Write what is buffered and let go."""


class Trackers:
    """Several trackers as one, each on its own when it fails. Use as a context manager.

    Args:
        trackers: those to tell.
    """

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all trackers; one that fails is left out from then on."""
        self._each(lambda tracker: tracker.write(kind, step, metrics))

    def forget_after(self, step: int) -> None:
        """Tell all trackers that the run goes on after `step` (-1: it begins anew)."""
        self._each(lambda tracker: tracker.forget_after(step))

    def close(self) -> None:
        """Close all trackers."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            # Policy: trackers are other people's code on other people's disks and servers. Whatever
            # they raise, the run goes on, with metrics.jsonl as its record.
            except Exception as error:  # noqa: BLE001
                self._trackers.remove(tracker)
                logger.warning(
                    "%s is left out from now on: %s: %s",
                    tracker.name,
                    type(error).__name__,
                    error,
                )


def open_trackers(
    settings: TelemetryConfig, run_dir: Path, config: Mapping[str, Any] | None = None
) -> Trackers:
    """The trackers that the configuration asks for.

    Args:
        settings: the `telemetry` section.
        run_dir: the run folder; everything kept on disk lies in it.
        config: the whole configuration as plain values, for trackers that show it.

    Raises:
        ConfigError: a tracker's package is not installed, or its port cannot be had.
    """
    opened = Trackers()
    try:
        for open_one in _wanted(settings, run_dir, config or {}):
            opened._trackers.append(open_one())
    except BaseException:
        opened.close()
        raise
    return opened


def _wanted(
    settings: TelemetryConfig, run_dir: Path, config: Mapping[str, Any]
) -> list[Callable[[], Tracker]]:
    """How to open each; the modules (and the packages behind them) are imported only then."""
    wanted: list[Callable[[], Tracker]] = []
    if settings.prometheus_port is not None:
        from rollmill.telemetry.prometheus import PrometheusEndpoint

        port = settings.prometheus_port
        wanted.append(lambda: PrometheusEndpoint(port, run=run_dir.name))
    if settings.tensorboard:
        from rollmill.telemetry.tensorboard import TensorBoardTracker

        wanted.append(lambda: TensorBoardTracker(run_dir / "tensorboard"))
    if settings.wandb.mode != "off":
        from rollmill.telemetry.wandb import WandbTracker

        wanted.append(lambda: WandbTracker(settings.wandb, run_dir, config))
    return wanted
