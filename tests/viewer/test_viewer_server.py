"""The server: what it answers, to whom, and that the run never notices."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollmill.viewer.errors import ViewerError
from rollmill.viewer.server import serve as serve_forever
from support.hostile_run import ROWS
from support.made_run import Shape, make_run

PATHS = (
    "api/runs",
    "api/runs/0/names",
    "api/runs/0/metrics?names=reward/mean,time/step_s&points=5",
    "api/runs/0/steps",
    "api/runs/0/rows?step=1",
    "api/runs/0/rows?kind=held_out&step=0",
    "api/runs/0/rows?kind=dropped&step=1",
    "api/runs/0/sample?kind=dropped&step=1&row=0",
    "api/runs/0/sample?step=1&row=0",
    "api/runs/0/group?step=1&group=0",
    "api/runs/0/search?text=a&min_reward=0",
    "api/runs/0/ledger",
    "api/runs/0/ledger/groups?state=consumed",
    "api/runs/0/ledger/history?group=0",
    "api/runs/0/timeline?step=1",
    "",
    "static/js/app.js",
    "static/vendor/uplot/uPlot.esm.js",
)


def ask(
    address: str, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request(method, f"/{path}", headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def test_every_answer_carries_the_content_policy(serve: Callable[..., Any], made_run: Path) -> None:
    with serve(made_run) as address:
        for path in (*PATHS, "nothing", "api/runs/0/rows?step=99"):
            _, headers, _ = ask(address, path)
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"


def test_only_requests_for_this_machine_are_answered(
    serve: Callable[..., Any], made_run: Path
) -> None:
    with serve(made_run) as address:
        port = urlsplit(address).port
        for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}"):
            assert ask(address, "api/runs", host=host)[0] == 200
        for host in ("evil.example", f"127.0.0.1.evil.example:{port}", "10.0.0.1", "", "[", "a b"):
            assert ask(address, "api/runs", host=host)[0] in (400, 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_but_reading_is_allowed(
    serve: Callable[..., Any], made_run: Path, method: str
) -> None:
    with serve(made_run) as address:
        assert ask(address, "api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "static/../server.py",
        "static/%2e%2e/server.py",
        "static/..%2f..%2fcli.py",
        "api/runs/1/rows?step=1",
        "api/runs/-1/rows?step=1",
        "api/runs/0/rows",
        "api/runs/0/rows?step=x",
        "api/runs/0/rows?step=1&kind=..%2fsamples",
        "api/runs/0/sample?step=1&row=99999",
        "api/runs/0/search?min_reward=nan",
        "api/runs/0/timeline?step=77",
    ],
)
def test_what_is_not_there_is_said_so(serve: Callable[..., Any], made_run: Path, path: str) -> None:
    with serve(made_run) as address:
        status, _, body = ask(address, path)
        assert status in (403, 404)
        if path.startswith("api"):
            assert json.loads(body)["error"]


def test_answers_to_hostile_runs_are_json(serve: Callable[..., Any], hostile_run: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    with serve(hostile_run) as address:
        paths = [f"api/runs/0/sample?step=1&row={n}" for n in range(len(ROWS))]
        for path in (*paths, *PATHS[:-3]):
            status, _, body = ask(address, path)
            assert status == 200, body[:200]
            assert len(body) < 3_000_000
            json.loads(body, parse_constant=refuse)


def test_broken_files_are_an_answer_not_a_crash(
    serve: Callable[..., Any], made_run: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", Shape(num_steps=1, num_groups=2))
    (run / "samples" / "step_000001.parquet").write_bytes(b"PAR1 torn")
    (run / "ledger.sqlite").write_bytes(b"not a database" * 100)
    (run / "trace" / "step_000001.json").write_text("[{")
    with serve(run) as address:
        for path in ("rows?step=1", "ledger", "timeline?step=1"):
            status, _, body = ask(address, f"api/runs/0/{path}")
            assert status == 500
            assert "cannot be read" in json.loads(body)["error"]
        assert ask(address, "api/runs")[0] == 200


def test_looking_changes_nothing(serve: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(num_steps=2, num_groups=2))

    def state() -> dict[str, tuple[int, bytes]]:
        files = [path for path in run.rglob("*") if path.is_file()]
        return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}

    before = state()
    with serve(run) as address:
        for path in PATHS:
            assert ask(address, path)[0] == 200
    assert state() == before


def test_a_viewer_killed_while_it_reads_does_not_hold_up_the_ledger(tmp_path: Path) -> None:
    """The run goes on writing its books under a viewer that is asked all the time, then killed."""
    from rollmill.data.ledger import Ledger, State

    run = make_run(tmp_path / "run", Shape(num_steps=1, num_groups=2))
    ledger = Ledger(run / "ledger.sqlite")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from rollmill.viewer.server import serve\n"
            "serve([Path(sys.argv[1])], port=0, on_ready=lambda a: print(a, flush=True))",
            str(run),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        slowest, group = 0.0, 1000
        done = threading.Event()
        reader = threading.Thread(target=_ask_until, args=(address, done), daemon=True)
        reader.start()
        for number in range(60):
            if number == 40:
                os.kill(process.pid, signal.SIGKILL)
            group += 1
            started = time.perf_counter()
            ledger.record(group, State.ISSUED, step=2)
            ledger.flush()
            slowest = max(slowest, time.perf_counter() - started)
        done.set()
        reader.join(30)
        assert ledger.balance()[State.ISSUED] == 60
        assert slowest < 1.5
    finally:
        process.kill()
        process.wait()
        ledger.close()


def _ask_until(address: str, done: threading.Event) -> None:
    while not done.is_set():
        try:
            ask(address, "api/runs/0/ledger")
        except OSError:
            return


def test_the_command_stops_when_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(num_steps=1, num_groups=1))
    code = (
        "import typer; from rollmill.viewer.commands import view\n"
        "app = typer.Typer(); app.command()(view); app()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("showing 1 run at http://127.0.0.1:")
    assert ask(first.split()[-1], "api/runs")[0] == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_the_viewer_serves_this_machine_only(made_run: Path) -> None:
    with pytest.raises(ViewerError, match="this machine only"):
        serve_forever([made_run], host="0.0.0.0", port=0)


def test_the_viewer_does_without_torch_and_the_run_packages(made_run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rollmill.viewer.server import make_app\n"
        f"make_app([Path({str(made_run)!r})])\n"
        "print([m for m in ('torch', 'transformers', 'rollmill.loop') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_samples_tell_tokens_figures_and_what_became_of_them(
    serve: Callable[..., Any], made_run: Path
) -> None:
    with serve(made_run) as address:
        page = json.loads(ask(address, "api/runs/0/sample?step=2&row=1")[2])
        later = json.loads(ask(address, "api/runs/0/sample?step=2&row=1&first=10")[2])
    tokens = page["tokens"]
    assert len(tokens["ids"]) == tokens["total"] == len(tokens["log_probs"])
    assert later["tokens"]["ids"] == tokens["ids"][10:]
    assert later["tokens"]["prompt"]["ids"] == []
    assert page["ledger"]["state"] == "consumed"
    assert page["ledger"]["step"] == 2
    assert page["advantage"] is not None
    with serve(made_run) as address:
        dropped = json.loads(ask(address, "api/runs/0/sample?kind=dropped&step=2&row=0")[2])
        told = json.loads(ask(address, "api/runs/0/ledger")[2])
    assert (dropped["decision"], dropped["reason"]) == ("rejected", "no spread")
    assert dropped["ledger"]["state"] == "rejected"
    assert dropped["advantage"] is None
    assert not dropped["in_loss"], "no step trained on it"
    assert told["length_bias"] == 0.97
    gaps = [
        abs(t - e)
        for t, e in zip(tokens["trainer_log_probs"], tokens["log_probs"], strict=True)
        if t is not None
    ]
    assert gaps
    assert all(math.isfinite(gap) for gap in gaps)
