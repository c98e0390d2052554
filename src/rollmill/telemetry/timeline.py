"""Where the time goes: spans on lanes, one file per step that Perfetto and the viewer can open.

A span says that something (a phase of the loop, a request on an engine, a judgement) took from one
moment to another. Spans are kept in memory and written to `FOLDER/step_NNNNNN.json` when the step
ends, in the Trace Event format (a JSON array, one event per line, times in microseconds since the
epoch). A full disk costs the spans and one warning, not the run.

Spans may be added from any thread.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson

logger = logging.getLogger(__name__)
FILE_NAME = re.compile(r"step_(\d+)\.json")
MAX_SPANS_PER_STEP = 100_000
MICROSECONDS = 1e6

Detail = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the timeline.

    Attributes:
        lane: whose bar: `loop`, `engine 0`, `trainer`, `rewards`, `sync`.
        name: what was done.
        start: seconds since the epoch.
        end: seconds since the epoch.
        details: small facts to show with it (group, tokens).
    """

    lane: str
    name: str
    start: float
    end: float
    details: dict[str, Detail] = field(default_factory=dict)


class Timeline:
    """Collects the spans of a run.

    Args:
        folder: created when missing; None collects nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._has_warned = False

    def add(self, lane: str, name: str, start: float, end: float, **details: Detail) -> None:
        """Add a span that is over; `start` and `end` are seconds since the epoch."""
        if self._folder is None:
            return
        with self._lock:
            if len(self._spans) < MAX_SPANS_PER_STEP:
                self._spans.append(Span(lane, name, start, end, details))

    @contextmanager
    def span(self, lane: str, name: str, **details: Detail) -> Iterator[dict[str, Detail]]:
        """Add a span for as long as the block runs, also when it raises.

        The block is given the span's details and may add what it learns.
        """
        started, clock = time.time(), time.monotonic()
        try:
            yield details
        finally:
            self.add(lane, name, started, started + time.monotonic() - clock, **details)

    def step_done(self, step: int) -> None:
        """Write the spans collected since the step before."""
        if self._folder is None:
            return
        with self._lock:
            spans, self._spans = self._spans, []
        path = self._folder / f"step_{step:06d}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            aside = path.with_suffix(".tmp")
            aside.write_bytes(encode_trace(spans))
            os.replace(aside, path)
        except OSError as error:
            if not self._has_warned:
                logger.warning("the timeline cannot be written to %s: %s", path, error)
            self._has_warned = True

    def forget_after(self, step: int) -> None:
        """Delete the files of steps after `step`: a resume does them again."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            match = FILE_NAME.fullmatch(path.name)
            if match and int(match[1]) > step:
                path.unlink(missing_ok=True)


def encode_trace(spans: list[Span]) -> bytes:
    """Spans as a trace file: lanes become named threads of one process."""
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(s.lane for s in spans))}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": 1,
            "tid": lanes[span.lane],
            "ts": span.start * MICROSECONDS,
            "dur": max(0.0, span.end - span.start) * MICROSECONDS,
            "args": span.details,
        }
        for span in spans
    ]
    return b"[\n" + b",\n".join(orjson.dumps(event) for event in events) + b"\n]\n"


def read_trace(path: Path) -> list[Span]:
    """The spans of a trace file.

    Raises:
        ValueError: it is not a trace file of ours.
    """
    try:
        events = orjson.loads(path.read_bytes())
        named = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
        return [_span(event, named) for event in events if event["ph"] == "X"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace: {type(error).__name__} {error}") from None


def _span(event: dict[str, object], lanes: dict[object, str]) -> Span:
    start, duration, details = event["ts"], event["dur"], event.get("args")
    if not isinstance(start, int | float) or not isinstance(duration, int | float):
        raise TypeError("a time is not a number")
    return Span(
        lane=lanes[event["tid"]],
        name=str(event["name"]),
        start=start / MICROSECONDS,
        end=(start + duration) / MICROSECONDS,
        details=dict(details) if isinstance(details, dict) else {},
    )
