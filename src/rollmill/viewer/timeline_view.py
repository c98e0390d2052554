"""One step as lanes: what the run traced, or what its other files tell when it traced nothing.

Without a trace, the phases come from the clocks in `metrics.jsonl` (rollout, train and sync, one
after the other, ending when the record was written) and the groups' bars from the ledger's events.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollmill.telemetry.timeline import Span, read_trace
from rollmill.viewer.errors import NotInRun
from rollmill.viewer.ledger_view import LedgerView
from rollmill.viewer.metrics_index import MetricsIndex, StepRecord

PHASES = ("rollout", "train", "sync")
LOOP_LANE = "loop"
GROUPS_LANE = "groups"
TAIL_SHARE = 0.9
MAX_SPANS = 20_000


class TimelineView:
    """The timeline of one run.

    Args:
        root: the run folder.
        metrics: its figures.
        ledger: its books.
    """

    def __init__(self, root: Path, metrics: MetricsIndex, ledger: LedgerView) -> None:
        self._root = root
        self._metrics = metrics
        self._ledger = ledger

    def step(self, step: int) -> dict[str, Any]:
        """Lanes, spans and a summary of one step; times are seconds from its start.

        Raises:
            NotInRun: the run has no record of the step.
        """
        record = self._metrics.step_record(step)
        traced = self._traced(step)
        if record is None and not traced:
            raise NotInRun(f"step {step} is not finished, or the run has no such step")
        phases = phase_spans(record) if record else []
        has_loop = any(span.lane == LOOP_LANE for span in traced)
        spans = [*([] if has_loop else phases), *traced]
        start = min(span.start for span in spans)
        end = max(span.end for span in spans)
        spans += self._group_spans(start, end)
        return {
            "step": step,
            "start": start,
            "seconds": end - start,
            "is_traced": bool(traced),
            "lanes": _lanes(spans[:MAX_SPANS], start, end),
            "num_left_out": max(0, len(spans) - MAX_SPANS),
            "tail": tail([s for s in spans if s.lane == GROUPS_LANE]),
        }

    def _traced(self, step: int) -> list[Span]:
        path = self._root / "trace" / f"step_{step:06d}.json"
        return read_trace(path) if path.is_file() else []

    def _group_spans(self, start: float, end: float) -> list[Span]:
        try:
            found = self._ledger.spans(start, end)
        except (NotInRun, sqlite3.Error):
            return []
        return [
            Span(
                lane=GROUPS_LANE,
                name=f"group {span.group}",
                start=max(start, span.start),
                end=min(end, span.end or end),
                details={"group": span.group, "became": span.state, "tokens": span.num_tokens},
            )
            for span in found
        ]


def phase_spans(record: StepRecord) -> list[Span]:
    """The phases of a step, one after the other, from its clocks."""
    start = record.time - record.seconds.get("step", sum(record.seconds.values()))
    spans = []
    for phase in PHASES:
        seconds = record.seconds.get(phase)
        if seconds is not None:
            spans.append(Span(LOOP_LANE, phase, start, start + seconds))
            start += seconds
    return spans or [Span(LOOP_LANE, "step", start, record.time)]


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds during which at least one span was open."""
    busy, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return busy


def tail(spans: Sequence[Span]) -> dict[str, float] | None:
    """How long the last tenth of the groups was waited for; None without groups.

    `share` is that time as a share of the time from the first start to the last end.
    """
    if not spans:
        return None
    ends = sorted(span.end for span in spans)
    start = min(span.start for span in spans)
    most_done = ends[max(0, int(len(ends) * TAIL_SHARE) - 1)]
    whole = ends[-1] - start
    seconds = ends[-1] - most_done
    return {"seconds": seconds, "share": seconds / whole if whole > 0 else 0.0}


def _lanes(spans: Sequence[Span], start: float, end: float) -> list[dict[str, Any]]:
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    whole = end - start
    return [
        {
            "name": name,
            "busy": busy_seconds(found) / whole if whole > 0 else 0.0,
            "spans": [_shown(span, start) for span in sorted(found, key=lambda s: s.start)],
        }
        for name, found in sorted(by_lane.items(), key=lambda item: _lane_order(item[0]))
    ]


def _lane_order(name: str) -> tuple[int, str]:
    first = (LOOP_LANE, "engine", "trainer", "rewards", "sync")
    known = [number for number, prefix in enumerate(first) if name.startswith(prefix)]
    return (len(first) + (name == GROUPS_LANE) if not known else known[0], name)


def _shown(span: Span, start: float) -> dict[str, Any]:
    return {
        "name": span.name,
        "start": span.start - start,
        "end": span.end - start,
        "details": span.details,
    }
