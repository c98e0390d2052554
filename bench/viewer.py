"""How long the viewer takes on a run of 2,000 steps x 512 samples of 1,024 tokens.

    python bench/viewer.py [--steps 2000] [--samples 512] [--tokens 1024] [--folder DIR] [--browser]

Makes the run (metrics, samples, ledger; eight different sample files, linked under 2,000 names),
starts the viewer in a process of its own and times what a person waits for, each on files the
viewer has not read yet: the first page (the page, its scripts, the list of runs and all curves of
the overview) and samples of steps all over the run (the list of the step, then the sample). With
--browser a headless Chromium opens the same places, and its own clock says how long it took until
all charts, or the sample's tokens, were drawn.

Expected on one core of a laptop: first page under 1 s, any sample under 300 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from rollmill.data.ledger import Ledger, State
from rollmill.sample import Sample, Segment, Status
from rollmill.telemetry.samples import SampleDump
from support.made_run import byte_tokenizer

NUM_FILES = 8
GROUP_SIZE = 8
FIGURES = [
    "reward/mean", "rollout/response_length_mean", "rollout/truncated", "train/policy/old_kl",
    "train/policy/entropy", "train/optimizer/grad_norm", "train/policy/clip_fraction",
    "rollout/staleness_mean", "train/mismatch/log_prob_diff_mean", "rollout/tokens_per_second",
    "rollout/wasted_tokens", "train/loss/total", "time/rollout_s", "time/train_s", "time/sync_s",
    "time/step_s", *(f"other/figure_{n}" for n in range(70)),
]  # fmt: skip


def make_big_run(root: Path, num_steps: int, num_samples: int, num_tokens: int) -> Path:
    """Write the run; returns its folder."""
    (root / "samples").mkdir(parents=True)
    (root / "tokenizer").mkdir()
    byte_tokenizer().save(str(root / "tokenizer" / "tokenizer.json"))
    config = {"run": {"num_steps": num_steps}, "model": {"path": "none"}}
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    rng = np.random.default_rng(0)
    kinds = [_samples_file(root, n, num_samples, num_tokens, rng) for n in range(NUM_FILES)]
    for step in range(1, num_steps + 1):
        os.link(kinds[step % NUM_FILES], root / "samples" / f"step_{step:06d}.parquet")
    with (root / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            row = {name: math.sin(step / 100) + float(rng.normal()) for name in FIGURES}
            file.write(json.dumps({"step": step, "kind": "train", "time": 1.79e9 + step, **row}))
            file.write("\n")
    ledger = Ledger(root / "ledger.sqlite")
    for step in range(1, num_steps + 1):
        first = (step - 1) * num_samples // GROUP_SIZE
        for group in range(first, first + num_samples // GROUP_SIZE):
            for state in (State.ISSUED, State.IN_FLIGHT, State.READY, State.CONSUMED):
                ledger.record(group, state, step=step, num_tokens=num_tokens * GROUP_SIZE)
    ledger.close()
    return root


def _samples_file(
    root: Path, number: int, num_samples: int, num_tokens: int, rng: np.random.Generator
) -> Path:
    samples = []
    for index in range(num_samples):
        ids = rng.integers(0, 256, num_tokens)
        log_probs = -rng.gamma(0.4, 1.0, num_tokens)
        sample = Sample(
            prompt_tokens=rng.integers(0, 256, 200),
            index=index,
            group_index=index // GROUP_SIZE,
            attempt=index % GROUP_SIZE,
            prompt=f"Question {index}: " + "what is the sum of all that was said? " * 5,
            label="42",
            segments=[Segment.from_engine(ids, log_probs, number)],
            response="word " * num_tokens,
            status=Status.COMPLETED,
            reward=float(rng.random() < 0.5),
            reward_outcome="value",
        )
        samples.append(sample)
    return SampleDump(root / "kinds").write(number, samples)


class Client:
    """Asks and remembers how long it took."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **parameters: object) -> bytes:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self.address}{path}{query}") as answer:
            body: bytes = answer.read()
        return body


def first_page(client: Client) -> float:
    """Seconds for everything that the overview needs, one after the other."""
    started = time.perf_counter()
    client.get("")
    for name in ("js/app.js", "vendor/uplot/uPlot.esm.js", "css/base.css"):
        client.get(f"static/{name}")
    client.get("api/runs")
    client.get("api/runs/0/names")
    client.get("api/runs/0/metrics", names=",".join(FIGURES[:16]), points=500)
    return time.perf_counter() - started


def open_sample(client: Client, step: int, row: int) -> tuple[float, float]:
    """Seconds for the list of a step, and for one of its samples."""
    started = time.perf_counter()
    client.get("api/runs/0/rows", step=step)
    listed = time.perf_counter()
    client.get("api/runs/0/sample", step=step, row=row)
    return listed - started, time.perf_counter() - listed


def browse(address: str, places: list[tuple[int, int]]) -> dict[str, float]:
    """What a person at a browser waits for, in milliseconds, by the browser's clock."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    until = (
        "const done = arguments[arguments.length - 1], start = performance.now();"
        "const look = () => ({condition}) ? done(performance.now() - {since}) : "
        "requestAnimationFrame(look); {action}; look();"
    )
    profile = tempfile.mkdtemp(prefix="rollmill-chromium-")
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    options.page_load_strategy = "eager"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    driver.set_script_timeout(60)
    try:
        driver.get(address)
        drawn = "document.querySelectorAll('.chart-card canvas').length >= 12"
        page = driver.execute_async_script(until.format(condition=drawn, since=0, action=""))
        times = []
        for step, row in places:
            where = f"#/samples?run=0&kind=train&step={step}&row={row}"
            sample = f"document.querySelector('.sample h2')?.innerText === 'Sample {row}'"
            condition = (
                f"{sample} && document.querySelector('.sample-head .muted').innerText === "
                f"'step {step}' && document.querySelector('.segment [data-at]')"
            )
            action = f"location.hash = '{where}'"
            times.append(
                driver.execute_async_script(
                    until.format(condition=condition, since="start", action=action)
                )
            )
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)
    return {
        "browser: first page": page,
        "browser: sample, median": statistics.median(times),
        "browser: sample, slowest": max(times),
    }


def measure(
    root: Path, num_steps: int, num_samples: int, *, has_browser: bool = False
) -> dict[str, float]:
    """The figures, in milliseconds."""
    code = (
        "import sys; from pathlib import Path; from rollmill.viewer.server import serve\n"
        "serve([Path(sys.argv[1])], port=0, on_ready=lambda a: print(a, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip())
        first = first_page(client)
        again = first_page(client)
        started = time.perf_counter()
        client.get("api/runs/0/steps")
        steps = time.perf_counter() - started
        rng = np.random.default_rng(1)
        places = [
            (int(rng.integers(1, num_steps + 1)), int(rng.integers(num_samples))) for _ in range(40)
        ]
        times = [open_sample(client, step, row) for step, row in places]
        started = time.perf_counter()
        client.get("api/runs/0/ledger")
        ledger = time.perf_counter() - started
        chosen = [(step % num_steps + 1, row) for step, row in places]
        seen = browse(client.address, chosen) if has_browser else {}
    finally:
        process.terminate()
        process.wait()
    lists, samples = ([t[part] * 1e3 for t in times] for part in (0, 1))
    both = [a + b for a, b in zip(lists, samples, strict=True)]
    return {
        "first page": first * 1e3,
        "first page, again": again * 1e3,
        "names of steps": steps * 1e3,
        "list of a step, median": statistics.median(lists),
        "sample, median": statistics.median(samples),
        "sample, slowest of 40": max(samples),
        "list and sample, slowest of 40": max(both),
        "ledger": ledger * 1e3,
        **seen,
    }


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch) / "run"
        if not root.exists():
            started = time.perf_counter()
            make_big_run(root, options.steps, options.samples, options.tokens)
            print(f"made in {time.perf_counter() - started:.0f} s")
        figures = measure(root, options.steps, options.samples, has_browser=options.browser)
        for name, figure in figures.items():
            print(f"{name:<32} {figure:8.1f} ms")


if __name__ == "__main__":
    main()
