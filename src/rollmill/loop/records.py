"""Everything a run writes down about itself: figures, trackers, timeline, samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rollmill.config import TelemetryConfig
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.timeline import Timeline
from rollmill.telemetry.trackers import Trackers


class Records:
    """One place to write to.

    Args:
        metrics: `metrics.jsonl`, always.
        trackers: TensorBoard and the like, as configured.
        timeline: where the time goes.
        dumps: the samples.
    """

    def __init__(
        self, metrics: MetricsLog, trackers: Trackers, timeline: Timeline, dumps: Dumps
    ) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self.timeline = timeline
        self.dumps = dumps

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of a training step (`train`) or an evaluation (`eval`)."""
        self._metrics.write(kind, step, metrics)
        self._trackers.write(kind, step, metrics)

    async def step_done(self, step: int) -> None:
        """Write the step's timeline."""
        await asyncio.to_thread(self.timeline.step_done, step)

    def forget_after(self, step: int) -> None:
        """A resume does the steps after `step` again: what was written of them goes."""
        self._metrics.forget_after(step)
        self._trackers.forget_after(step)
        self.timeline.forget_after(step)
        self.dumps.forget_after(step)


def open_timeline(settings: TelemetryConfig, run_dir: Path) -> Timeline:
    """The run's timeline; one that collects nothing when it is switched off."""
    return Timeline(run_dir / "trace" if settings.trace else None)
