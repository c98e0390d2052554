"""How fast things were in a run: its figures and its trace as the assumptions of a plan.

- Decoding: while c answers are open, each at its own mean rate, all together write R tokens a
  second, so a decoding step takes c / R. A line through these, weighted by time, is the engine.
  Queueing, prompts and the driver's own work are in it, which is what a plan wants.
- What the line misses (the ends of batches, aborts) is one factor: with it, steps simulated with
  the measured lengths take as long as they took.
- Training: seconds against tokens, a line when the batches differ enough in size to tell, otherwise
  in proportion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.errors import ConfigError
from rollmill.loop.run_dir import RunDir
from rollmill.plan.assumptions import Assumptions
from rollmill.plan.schedule import Schedule, mean_of
from rollmill.plan.simulate import simulate
from rollmill.telemetry.metrics_log import read_metrics
from rollmill.telemetry.timeline import Span, read_trace

Floats = npt.NDArray[np.float64]
WARM_UP_STEPS = 1
MIN_STEPS = 8
"""Of more steps the newer half is looked at: as a run learns, lengths and work change."""
SPREAD_FOR_A_LINE = 0.1
NUM_SIMULATED = 20
LARGEST_SCALE = 8.0
NUM_HALVINGS = 12
SCOPE = "train/"
"""Requests of training are named so; those of evaluations are not."""


@dataclass(frozen=True)
class Measured:
    """What was found in a run.

    Attributes:
        assumptions: how fast things were.
        steps: the steps that were looked at.
        step_s: their mean time.
        simulated_s: the mean step of a simulation with these assumptions.
    """

    assumptions: Assumptions
    steps: tuple[int, ...]
    step_s: float
    simulated_s: float


def fit(run: Path, schedule: Schedule, *, last_step: int | None = None) -> Measured:
    """The assumptions that explain the newer half of a run's steps (at least 8 where there are).

    The first step is left out as warm-up.

    Args:
        run: the run folder.
        schedule: what that run ran.
        last_step: the last step to look at.

    Raises:
        ConfigError: the run has too few steps, no trace or no samples.
    """
    records = _records(RunDir(run), last_step)
    steps = [int(record["step"]) for record in records]
    requests, grade_s = _traces(run, steps, schedule.num_graders)
    line = decode_line(requests, schedule.places, schedule.num_engines)
    lengths = _lengths(RunDir(run), steps)
    fixed_s, train_rate = train_line(
        np.array([record["rollout/response_tokens"] for record in records]),
        np.array([record["time/train_s"] for record in records]),
    )
    kept = sum(record.get("rollout/groups/accepted", 1.0) for record in records)
    rejected = sum(record.get("rollout/groups/rejected", 0.0) for record in records)
    found = Assumptions(
        response_tokens=float(np.mean([n for group in lengths for n in group])),
        tokens_per_second=schedule.places / (line[0] + line[1] * schedule.places),
        tokens_per_second_alone=1.0 / (line[0] + line[1]),
        train_tokens_per_second=train_rate,
        train_fixed_s=fixed_s,
        sync_s=_mean(records, "time/sync_s"),
        grade_s=grade_s,
        other_s=float(np.mean([_other_seconds(record) for record in records])),
        accepted_share=kept / (kept + rejected),
        lengths=lengths,
    )
    found = _calibrated(found, schedule, _mean(records, "time/step_s"))
    simulated = mean_of(simulate(schedule, found, num_steps=NUM_SIMULATED))
    return Measured(found, tuple(steps), _mean(records, "time/step_s"), simulated.seconds)


def decode_line(requests: Sequence[Span], places: int, num_engines: int) -> tuple[float, float]:
    """(a, b): one engine's decoding step with c answers takes a + b·c seconds.

    Args:
        requests: spans of generate calls, with the detail `tokens`.
        places: answers that one engine decodes together; more wait in line.
        num_engines: how many engines shared the requests evenly.
    """
    written = [span for span in requests if span.details.get("tokens") and span.end > span.start]
    edges = sorted({time for span in written for time in (span.start, span.end)})
    index = {time: number for number, time in enumerate(edges)}
    open_ones, rates = np.zeros(len(edges)), np.zeros(len(edges))
    for span in written:
        rate = float(span.details["tokens"] or 0) / (span.end - span.start)
        for array, value in ((open_ones, 1.0), (rates, rate)):
            array[index[span.start]] += value
            array[index[span.end]] -= value
    width = np.diff(edges)
    counts, totals = np.cumsum(open_ones)[:-1], np.cumsum(rates)[:-1]
    is_open = counts > 0.5
    decoded = np.minimum(counts[is_open] / num_engines, places)
    seconds = decoded * num_engines / np.maximum(totals[is_open], 1e-9)
    return weighted_line(decoded, seconds, width[is_open])


def train_line(tokens: Floats, seconds: Floats) -> tuple[float, float]:
    """(seconds that do not depend on the tokens, tokens per second) of training steps."""
    if tokens.std() > SPREAD_FOR_A_LINE * tokens.mean():
        fixed, per_token = weighted_line(tokens, seconds, np.ones(len(tokens)))
        if per_token > 0:
            return fixed, 1.0 / per_token
    return 0.0, float(tokens.sum() / seconds.sum())


def weighted_line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """The line a + b·x nearest to y by weighted squares with a ≥ 0 and b ≥ 0."""
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread = np.average((x - mean_x) ** 2, weights=weights)
    slope = np.average((x - mean_x) * (y - mean_y), weights=weights) / spread if spread else 0.0
    if slope <= 0:
        return float(mean_y), 0.0
    if mean_y - slope * mean_x < 0:
        through_zero = np.average(x * y, weights=weights) / np.average(x * x, weights=weights)
        return 0.0, float(through_zero)
    return float(mean_y - slope * mean_x), float(slope)


def _calibrated(found: Assumptions, schedule: Schedule, step_s: float) -> Assumptions:
    """Engine rates scaled until a simulated step takes as long as the measured ones did.

    Unscaled, when no scale within reach does that: then something else than engines was waited for.
    """

    def scaled(factor: float) -> Assumptions:
        return replace(
            found,
            tokens_per_second=found.tokens_per_second * factor,
            tokens_per_second_alone=found.tokens_per_second_alone * factor,
        )

    def seconds(factor: float) -> float:
        return mean_of(simulate(schedule, scaled(factor), num_steps=NUM_SIMULATED)).seconds

    slow, fast = 1 / LARGEST_SCALE, LARGEST_SCALE
    if not seconds(fast) <= step_s <= seconds(slow):
        return found
    for _ in range(NUM_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if seconds(middle) > step_s else (slow, middle)
    return scaled((slow * fast) ** 0.5)


def _records(run_dir: RunDir, last_step: int | None) -> list[dict[str, Any]]:
    found = list(read_metrics(run_dir.metrics)) if run_dir.metrics.is_file() else []
    trained = [r for r in found if r["kind"] == "train" and "time/rollout_s" in r]
    kept = [r for r in trained if last_step is None or r["step"] <= last_step][WARM_UP_STEPS:]
    if not kept:
        raise ConfigError(
            "the run is too short to learn from",
            where=f"--trace {run_dir.root}",
            expected=f"at least {WARM_UP_STEPS + 1} finished steps in metrics.jsonl",
            found=f"{len(trained)}",
            fix="let it do two steps more, or state the speeds with --assume",
        )
    return kept[-max(MIN_STEPS, -(-len(kept) // 2)) :]


def _traces(run: Path, steps: Sequence[int], num_graders: int) -> tuple[list[Span], float]:
    """Requests of training, and seconds to judge one answer."""
    requests: list[Span] = []
    judged: list[Span] = []
    for step in steps:
        path = run / "trace" / f"step_{step:06d}.json"
        if path.is_file():
            for span in read_trace(path):
                if span.name == "generate" and str(span.details.get("request")).startswith(SCOPE):
                    requests.append(span)
                elif span.name == "judge":
                    judged.append(span)
    if not any(span.details.get("tokens") for span in requests):
        raise ConfigError(
            "the run has no trace of its requests",
            where=f"--trace {run}",
            expected="trace/step_NNNNNN.json with the tokens of each request",
            fix="run a few steps with telemetry.trace: true",
        )
    return requests, grade_seconds(judged, num_graders)


def grade_seconds(judged: Sequence[Span], num_graders: int) -> float:
    """Seconds to judge one answer: as long as it took, or less when answers waited in line."""
    if not judged:
        return 0.0
    taken = float(np.mean([span.end - span.start for span in judged]))
    busy, reached = 0.0, float("-inf")
    for span in sorted(judged, key=lambda one: one.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return min(taken, busy * num_graders / len(judged))


def _lengths(run_dir: RunDir, steps: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Tokens that engines wrote, by group, of what was trained on and what was dropped."""
    import pyarrow.parquet as pq

    groups: dict[int, list[int]] = defaultdict(list)
    for folder in (run_dir.samples, run_dir.root / "dropped"):
        for step in steps:
            path = folder / f"step_{step:06d}.parquet"
            if path.is_file():
                for row in pq.read_table(path, columns=["group_index", "segments"]).to_pylist():
                    written = sum(s["length"] for s in row["segments"] if s["source"] == "engine")
                    groups[row["group_index"]].append(written)
    if not groups:
        raise ConfigError(
            "the run has no samples to take lengths from",
            where=f"--trace {run_dir.root}",
            expected="samples/step_NNNNNN.parquet",
            fix="run a few steps with telemetry.dump_samples: true",
        )
    return tuple(tuple(lengths) for lengths in groups.values())


def _other_seconds(record: dict[str, Any]) -> float:
    parts = ("time/rollout_s", "time/train_s", "time/sync_s")
    return max(0.0, float(record["time/step_s"]) - sum(float(record[name]) for name in parts))


def _mean(records: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([record[name] for record in records]))
