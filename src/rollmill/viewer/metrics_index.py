"""`metrics.jsonl` as columns, kept up to date by reading only what was appended.

The run appends whole lines and replaces the file when it resumes; both are noticed here: bytes
after the last newline are left for the next look, and another or a shorter file is read anew.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollmill.viewer.downsample import Curve, downsample, in_order

BLOCK_BYTES = 4 << 20
EVAL_PREFIX = "eval/"
EVAL_CLOCK = "time/eval_s"


@dataclass(slots=True)
class _Series:
    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """When a training step was written down, and how long its phases took.

    Attributes:
        step: number of the step.
        time: seconds since the epoch at its end.
        seconds: phase name (`rollout`, `train`, `sync`, `step`) to seconds.
    """

    step: int
    time: float
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Headline:
    """A run in a few figures.

    Attributes:
        generation: changes when the file was replaced.
        num_records: lines read.
        num_bad_lines: lines that are not records.
        last_step: highest training step; None before the first.
        started: time of the first record; None without one.
        updated: time of the last record; None without one.
        latest: the newest value of every figure.
    """

    generation: int
    num_records: int
    num_bad_lines: int
    last_step: int | None
    started: float | None
    updated: float | None
    latest: Mapping[str, float]


class MetricsIndex:
    """All figures of one run, by name. Safe to use from several threads.

    Args:
        path: the run's `metrics.jsonl`; it may be missing, now or later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._generation = 0
        self._forget()

    def headline(self) -> Headline:
        """What there is, after a look at the file."""
        with self._lock:
            self._refresh()
            return Headline(
                generation=self._generation,
                num_records=self._num_records,
                num_bad_lines=self._num_bad_lines,
                last_step=max(self._train_steps, default=None),
                started=self._started,
                updated=self._updated,
                latest={name: series.values[-1] for name, series in self._series.items()},
            )

    def names(self) -> list[str]:
        """Names of all figures, sorted."""
        with self._lock:
            self._refresh()
            return sorted(self._series)

    def curves(self, names: Iterable[str], points: int) -> dict[str, Curve]:
        """The named figures over the steps, at most `points` points each; unknown ones left out."""
        with self._lock:
            self._refresh()
            known = {name: self._series[name] for name in names if name in self._series}
            arrays = {n: (np.array(s.steps), np.array(s.values)) for n, s in known.items()}
        return {
            name: downsample(*in_order(steps, values), points)
            for name, (steps, values) in arrays.items()
        }

    def step_record(self, step: int) -> StepRecord | None:
        """When `step` was written down; None when it was not (yet)."""
        with self._lock:
            self._refresh()
            return self._train_steps.get(step)

    def _forget(self) -> None:
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._rest = b""
        self._series: dict[str, _Series] = {}
        self._train_steps: dict[int, StepRecord] = {}
        self._num_records = 0
        self._num_bad_lines = 0
        self._started: float | None = None
        self._updated: float | None = None

    def _refresh(self) -> None:
        try:
            with self._path.open("rb") as file:
                self._follow(os.fstat(file.fileno()))
                file.seek(self._offset)
                while block := file.read(BLOCK_BYTES):
                    self._take(block)
        except FileNotFoundError:
            if self._identity is not None:
                self._generation += 1
                self._forget()

    def _follow(self, now: os.stat_result) -> None:
        identity = (now.st_dev, now.st_ino)
        is_another = self._identity is not None and identity != self._identity
        if is_another or now.st_size < self._offset:
            self._generation += 1
            self._forget()
        self._identity = identity

    def _take(self, block: bytes) -> None:
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            if line.strip():
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            record = orjson.loads(line)
            step, when = int(record["step"]), float(record["time"])
            is_eval = record["kind"] == "eval"
        except (ValueError, KeyError, TypeError):
            self._num_bad_lines += 1
            return
        self._num_records += 1
        self._started = when if self._started is None else self._started
        self._updated = when
        for name, value in _figures(record, is_eval):
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = _Series()
            series.steps.append(step)
            series.values.append(value)
        if not is_eval:
            self._train_steps[step] = StepRecord(step, when, _phases(record))


def _figures(record: Mapping[str, Any], is_eval: bool) -> Iterable[tuple[str, float]]:
    """The numbers of a record. An evaluation repeats the clocks of the step before: left out."""
    for name, value in record.items():
        if not isinstance(value, int | float) or name in ("step", "time"):
            continue
        if not is_eval or name.startswith(EVAL_PREFIX) or name == EVAL_CLOCK:
            yield name, value


def _phases(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix("time/").removesuffix("_s"): float(value)
        for name, value in record.items()
        if name.startswith("time/") and name.endswith("_s") and isinstance(value, int | float)
    }
