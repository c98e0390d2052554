"""The newest figures of a run for Prometheus, at `/metrics` on this machine.

Answers come from a thread of their own and from a ready-made text, so a scrape never waits for the
run, nor the run for a scrape.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rollmill.errors import ConfigError

HOST = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


class PrometheusEndpoint:
    """Serves the newest value of every figure as a gauge `rollmill_…{run="…"}`.

    Args:
        port: where to listen; 0 takes any free port.
        run: the value of the label `run`.

    Raises:
        ConfigError: the port cannot be had.
    """

    name = "the Prometheus endpoint"

    def __init__(self, port: int, run: str) -> None:
        self._run = run
        self._figures: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._text = b""
        try:
            self._server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise ConfigError(
                "the Prometheus endpoint cannot listen",
                where="telemetry.prometheus_port",
                found=f"{HOST}:{port}: {error.strerror or error}",
                fix="choose another port (0 takes any free one), or none",
            ) from None
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def address(self) -> str:
        """Where Prometheus finds the figures."""
        return f"http://{HOST}:{self._server.server_address[1]}/metrics"

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Serve these figures from now on."""
        self._figures.update(metrics)
        self._steps[kind] = step
        self._text = exposition(self._run, self._steps, self._figures).encode()

    def forget_after(self, step: int) -> None:
        """Nothing: only the newest figures are served, and they come from this process."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = endpoint._text if is_known else b"see /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not worth a line."""

        return Handler


def exposition(run: str, steps: Mapping[str, int], figures: Mapping[str, float]) -> str:
    """Figures in Prometheus' text format 0.0.4, sorted by name.

    `train/policy/old_kl` becomes `rollmill_train_policy_old_kl`; of figures whose names become the
    same, the last is kept, since a name may be given once only.
    """
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    named = {_metric_name(name): value for name, value in figures.items()}
    lines = ["# TYPE rollmill_step gauge"]
    lines += [f'rollmill_step{{run="{label}",kind="{k}"}} {n}' for k, n in sorted(steps.items())]
    for name, value in sorted(named.items()):
        lines += [f"# TYPE {name} gauge", f'{name}{{run="{label}"}} {_number(value)}']
    return "\n".join(lines) + "\n"


def _metric_name(name: str) -> str:
    return f"rollmill_{NOT_IN_NAMES.sub('_', name).strip('_')}"


def _number(value: float) -> str:
    special = {float("inf"): "+Inf", float("-inf"): "-Inf"}
    return "NaN" if value != value else special.get(value, repr(float(value)))
