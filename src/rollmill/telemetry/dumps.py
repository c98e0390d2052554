"""All Parquet files of a run in one place: what was trained on, dropped, evaluated and learned.

Each kind is its own writer with its own one warning; this only says which folder holds which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmill.config.run import TelemetryConfig
from rollmill.sample import Group, Sample, flatten
from rollmill.telemetry.dropped import Dropped, DroppedDump
from rollmill.telemetry.samples import SampleDump
from rollmill.telemetry.trained import TrainedDump, TrainedSample

Reasons = Iterable[tuple[Group, str]]


class Dumps:
    """Writes the samples of a run, unless `telemetry.dump_samples` is off.

    Args:
        settings: the `telemetry` section.
        run_dir: the run folder.
    """

    def __init__(self, settings: TelemetryConfig, run_dir: Path) -> None:
        self.is_on = settings.dump_samples
        self._samples = SampleDump(run_dir / "samples")
        self._trained = TrainedDump(run_dir / "trained")
        self._dropped = DroppedDump(run_dir / "dropped", settings.max_dropped_samples)
        self._eval_dir = run_dir / "eval"
        self._evals: dict[str, SampleDump] = {}

    def rollouts(
        self, step: int, groups: Sequence[Group], *, rejected: Reasons = (), failed: Reasons = ()
    ) -> None:
        """The batch of a step in `samples/`, and groups that did not make it in `dropped/`."""
        if self.is_on:
            self._samples.write(step, flatten(groups))
            self.turned_down(step, rejected=rejected, failed=failed)

    def turned_down(self, step: int, *, rejected: Reasons = (), failed: Reasons = ()) -> None:
        """Groups that did not make it into the batch of a step, in `dropped/`."""
        if not self.is_on:
            return
        turned_down = {"rejected": rejected, "failed": failed}
        self._dropped.write(
            step,
            (
                Dropped(group, decision, reason)
                for decision, pairs in turned_down.items()
                for group, reason in pairs
            ),
        )

    def trained(self, step: int, reports: Iterable[Mapping[str, Any]]) -> None:
        """What the trainer measured (see `TrainedSample.from_wire`) in `trained/`."""
        if self.is_on:
            self._trained.write(step, map(TrainedSample.from_wire, reports))

    def evaluation(self, name: str, step: int, samples: Iterable[Sample]) -> None:
        """The answers to an evaluation set in `eval/NAME/`."""
        if self.is_on:
            self._eval(name).write(step, samples)

    def forget_after(self, step: int) -> None:
        """Delete the files of steps after `step`: a resume does them again."""
        names = [e.name for e in self._eval_dir.iterdir()] if self._eval_dir.is_dir() else []
        self._trained.forget_after(step)
        self._dropped.forget_after(step)
        for dump in (self._samples, *map(self._eval, names)):
            dump.forget_after(step)

    def _eval(self, name: str) -> SampleDump:
        return self._evals.setdefault(name, SampleDump(self._eval_dir / name))
