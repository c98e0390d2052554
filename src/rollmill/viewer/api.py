"""The viewer's answers: small JSON documents about the runs, one handler each.

Reading files is done in threads, so that one slow answer does not hold up the others. Whatever is
wrong with a run's files ends as `{"error": …}` that the page shows in its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import orjson
import pyarrow as pa
from aiohttp import web

from rollmill import __version__
from rollmill.viewer.downsample import Curve
from rollmill.viewer.errors import NotInRun
from rollmill.viewer.runs import Run
from rollmill.viewer.sample_files import FOLDERS, TRAIN
from rollmill.viewer.sample_page import sample_page
from rollmill.viewer.search import Query, search
from rollmill.viewer.trained_files import read_trained
from rollmill.viewer.waste import LENGTH_BIAS, token_report

logger = logging.getLogger(__name__)
MAX_POINTS = 4000
DEFAULT_POINTS = 400
MAX_SIBLINGS = 64
SIBLING_TOKENS = 1024

Answer = Callable[[Run, "Params"], Any]


class Params:
    """The parameters of one request, read with their types.

    Args:
        values: of the path and the query.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        """A parameter as text."""
        return self._values.get(name, default)

    def whole(self, name: str) -> int:
        """A whole number that must be there; NotInRun otherwise."""
        value = self.maybe_whole(name)
        if value is None:
            raise NotInRun(f"the address lacks {name}")
        return value

    def maybe_whole(self, name: str) -> int | None:
        """A whole number, or None when it is not there; NotInRun when it is something else."""
        value = self._number(name, int)
        return None if value is None else int(value)

    def maybe_number(self, name: str) -> float | None:
        """A finite number, or None when it is not there; NotInRun when it is something else."""
        value = self._number(name, float)
        if value is not None and not math.isfinite(value):
            raise NotInRun(f"{name} is not a finite number")
        return value

    def _number(self, name: str, kind: Callable[[str], float]) -> float | None:
        text = self._values.get(name, "")
        if not text:
            return None
        try:
            return kind(text)
        except ValueError:
            raise NotInRun(f"{name} is not a number: {text[:40]!r}") from None


def routes(runs: list[Run]) -> list[web.RouteDef]:
    """The routes below `/api`."""
    answers: dict[str, Answer] = {
        "metrics": metrics,
        "names": metric_names,
        "steps": sample_steps,
        "rows": sample_rows,
        "sample": sample,
        "group": group,
        "search": search_samples,
        "ledger": ledger,
        "ledger/groups": ledger_groups,
        "ledger/history": ledger_history,
        "timeline": timeline,
    }

    async def list_runs(_: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(run_list, runs))

    return [web.get("/api/runs", list_runs)] + [
        web.get(f"/api/runs/{{run}}/{name}", _handler(runs, answer))
        for name, answer in answers.items()
    ]


def run_list(runs: list[Run]) -> dict[str, Any]:
    """All runs in a few figures each; cheap enough to ask for every second."""
    return {
        "version": __version__,
        "now": time.time(),
        "runs": [_run_entry(number, run) for number, run in enumerate(runs)],
    }


def _run_entry(number: int, run: Run) -> dict[str, Any]:
    entry = {
        "id": number,
        "name": run.name,
        "folder": str(run.root),
        "num_steps": run.setting("run", "num_steps"),
        "model": run.setting("model", "path"),
        "algorithm": run.setting("trainer", "algorithm", "advantage"),
        "max_staleness": run.setting("rollout", "max_staleness"),
    }
    try:
        return entry | asdict(run.metrics.headline())
    except OSError as error:
        return entry | {"error": str(error)}


def metrics(run: Run, params: Params) -> Any:
    """`names` (comma-separated) as curves of at most `points` points."""
    names = [name for name in params.text("names").split(",") if name]
    points = min(MAX_POINTS, max(1, params.maybe_whole("points") or DEFAULT_POINTS))
    curves = run.metrics.curves(names, points)
    return {"curves": {name: _curve(curve) for name, curve in curves.items()}}


def metric_names(run: Run, _: Params) -> Any:
    """The names of all figures."""
    return {"names": run.metrics.names()}


def sample_steps(run: Run, _: Params) -> Any:
    """The steps that have samples, by kind. Who asks will soon ask for tokens: get ready."""
    threading.Thread(target=run.tokenizer.load, daemon=True).start()
    kinds = run.samples.kinds()
    return {"kinds": [{"name": kind, "steps": run.samples.steps(kind)} for kind in kinds]}


def sample_rows(run: Run, params: Params) -> Any:
    """The samples of `step`, without their tokens."""
    rows = run.samples.rows(params.text("kind", "train"), params.whole("step"))
    return {"rows": [asdict(row) for row in rows]}


def sample(run: Run, params: Params) -> Any:
    """The sample in `row` of `step`, with response tokens from `first` on."""
    kind, step, row = params.text("kind", "train"), params.whole("step"), params.whole("row")
    first = max(0, params.maybe_whole("first") or 0)
    (page,) = _sample_pages(run, kind, step, [row], first_token=first)
    return page | {"ledger": _ledger_entry(run, page["group"]) if kind in FOLDERS else None}


def group(run: Run, params: Params) -> Any:
    """All samples of `group` at `step`, side by side."""
    kind, step, number = params.text("kind", "train"), params.whole("step"), params.whole("group")
    rows = [row.row for row in run.samples.rows(kind, step) if row.group == number]
    shown = rows[:MAX_SIBLINGS]
    pages = _sample_pages(run, kind, step, shown, num_tokens=SIBLING_TOKENS)
    return {"samples": pages, "num_left_out": len(rows) - len(shown)}


def search_samples(run: Run, params: Params) -> Any:
    """Samples of all steps that match, newest first, as far as a second allows."""
    query = Query(
        text=params.text("text"),
        status=params.text("status"),
        group=params.maybe_whole("group"),
        min_reward=params.maybe_number("min_reward"),
        max_reward=params.maybe_number("max_reward"),
    )
    kind = params.text("kind", "train")
    return search(run.samples, kind, query, before=params.maybe_whole("before"))


def ledger(run: Run, _: Params) -> Any:
    """Where every prompt is, and the tokens that were wasted."""
    return run.ledger.summary() | {
        "tokens": token_report(run.metrics),
        "length_bias": run.metrics.headline().latest.get(LENGTH_BIAS),
    }


def ledger_groups(run: Run, params: Params) -> Any:
    """Some groups, newest first."""
    state = params.text("state") or None
    return {"groups": run.ledger.groups(state, params.maybe_whole("before"))}


def ledger_history(run: Run, params: Params) -> Any:
    """What happened to one group."""
    return {"events": run.ledger.history(params.whole("group"))}


def timeline(run: Run, params: Params) -> Any:
    """One step as lanes."""
    return run.timeline.step(params.whole("step"))


def _sample_pages(
    run: Run, kind: str, step: int, rows: list[int], **window: int
) -> list[dict[str, Any]]:
    entries = run.samples.read(kind, step, rows)
    indices = [entry["index"] for entry in entries]
    trained = read_trained(run.root, step, indices) if kind == TRAIN else {}
    return [
        sample_page(
            entry,
            row=row,
            tokenizer=run.tokenizer,
            reward_key=run.reward_key,
            trained=trained.get(entry["index"]),
            **window,
        )
        for row, entry in zip(rows, entries, strict=True)
    ]


def _ledger_entry(run: Run, number: int) -> dict[str, Any] | None:
    """The last thing that happened to a group: the filter's decision among others."""
    try:
        events = run.ledger.history(number)
    except (NotInRun, sqlite3.Error):
        return None
    current = [event for event in events if not event["undone"]]
    return current[-1] if current else None


def _curve(curve: Curve) -> dict[str, Any]:
    is_merged = curve.low is not None and curve.high is not None
    bounds = {"low": curve.low, "high": curve.high} if is_merged else {}
    return {"x": curve.x, "y": curve.y, **bounds}


def _handler(runs: list[Run], answer: Answer) -> Callable[[web.Request], Any]:
    async def handle(request: web.Request) -> web.Response:
        params = Params({**request.query, **request.match_info})
        try:
            return _json(await asyncio.to_thread(_answer, runs, answer, params))
        except NotInRun as error:
            return _json({"error": str(error)}, status=404)
        # Policy: a run's files may be torn, foreign or half written; the page says so in place.
        except (
            OSError,
            pa.ArrowException,
            sqlite3.Error,
            ValueError,
            KeyError,
            TypeError,
        ) as error:
            logger.warning("%s: %s: %s", request.path_qs, type(error).__name__, error)
            text = f"this cannot be read: {type(error).__name__}: {error}"
            return _json({"error": text[:2000]}, status=500)

    return handle


def _answer(runs: list[Run], answer: Answer, params: Params) -> Any:
    number = params.whole("run")
    if not 0 <= number < len(runs):
        raise NotInRun(f"there is no run {number}")
    return answer(runs[number], params)


def _json(value: Any, status: int = 200) -> web.Response:
    try:
        body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # Integers beyond 64 bits and the like, from user data.
        body = json.dumps(value, default=str, allow_nan=False).encode("utf-8", "replace")
    return web.Response(body=body, status=status, content_type="application/json")
