"""Recorded answers through the whole loop: SFT by the command line, without engines."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from rollmill.data.ledger import State
from rollmill.data.ledger_report import read_report
from rollmill.loop.export import export_run
from rollmill.telemetry.samples import read_samples
from support.tiny import NUM_DIGITS, exact_match
from support.tiny_run import metrics_of, rollmill, write_tiny_run

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}>{{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
SFT = {
    "rollout__source": "replay",
    "rollout__n_samples_per_prompt": 1,
    "data__path": "task/talks.jsonl",
    "data__sft": {},
    "trainer__algorithm": {"advantage": "none", "loss": "sft", "aggregation": "per_token"},
    "trainer__optimizer__lr": 2e-3,
}
SMALL = {**SFT, "run__num_steps": 4, "rollout__batch_size": 8, "eval__datasets": []}


def write_sft_run(folder: Path, **changes: Any) -> Path:
    """A tiny run that learns from `task/talks.jsonl`: conversations of sorting, mostly right."""
    config = write_tiny_run(folder, **{**SFT, **changes})
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    rng = random.Random(0)
    rows = []
    for _ in range(512):
        digits = f"{rng.randrange(10**NUM_DIGITS):0{NUM_DIGITS}d}"
        answer = "".join(sorted(digits)) if rng.random() < 0.6 else digits
        talk = [{"role": "user", "content": digits}, {"role": "assistant", "content": answer}]
        rows.append({"messages": talk, "metadata": {"digits": digits}})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "task" / "talks.jsonl").write_text(text, encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four steps."""
    folder = tmp_path_factory.mktemp("sft")
    done = rollmill("train", write_sft_run(folder, **SMALL))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_sft_needs_no_engine_and_keeps_the_books_and_figures_of_any_run(run: Path) -> None:
    assert [path.name for path in (run / "logs").iterdir() if "engine" in path.name] == []
    records = metrics_of(run, "train")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["train/tokens/trained"] == 8 * (NUM_DIGITS + 1)
        assert record["train/sft/nll"] == pytest.approx(record["train/loss/total"], rel=1e-6)
        assert record["train/sft/perplexity"] == pytest.approx(math.exp(record["train/sft/nll"]))
        unmeasured = ("reward/", "train/reward/", "train/mismatch/", "weights/", "time/sync_s")
        assert [name for name in record if name.startswith(unmeasured)] == []
    assert records[-1]["train/sft/nll"] < records[0]["train/sft/nll"]
    report = read_report(run / "ledger.sqlite")
    assert report.balance[State.CONSUMED] == report.num_issued == 4 * 8
    sample = read_samples(run / "samples" / "step_000004.parquet")[0]
    assert {segment.source for segment in sample.segments} == {"data"}
    assert sample.prompt == sample.metadata["digits"] + ">"
    assert sample.response.endswith("<eos>")


def test_a_stopped_sft_run_goes_on_as_if_it_had_not_stopped(run: Path, tmp_path: Path) -> None:
    parted = write_sft_run(tmp_path, **SMALL)
    assert rollmill("train", parted, "run.num_steps=2").returncode == 0
    again = rollmill("train", parted)
    assert "resumed after step 2" in again.stdout, again.stderr
    runs = (run, tmp_path / "run")
    a, b = (metrics_of(folder, "train") for folder in runs)
    for name in ("train/loss/total", "train/optimizer/grad_norm", "rollout/response_tokens"):
        assert [record[name] for record in a] == [record[name] for record in b], name
    taken = [
        [s.metadata for s in read_samples(folder / "samples/step_000004.parquet")]
        for folder in runs
    ]
    assert taken[0] == taken[1]
    assert read_report(tmp_path / "run/ledger.sqlite").num_issued == 4 * 8


def test_sft_then_grpo_then_export(tmp_path: Path) -> None:
    changes = {"run__num_steps": 90, "rollout__batch_size": 64, "eval__at_start": False}
    taught = rollmill("train", write_sft_run(tmp_path / "sft", **changes))
    assert taught.returncode == 0, taught.stderr
    export_run(tmp_path / "sft/run", tmp_path / "student", dtype="float32")

    grpo = write_tiny_run(tmp_path / "grpo", model__path=str(tmp_path / "student"),
                          run__num_steps=8)  # fmt: skip
    trained = rollmill("train", grpo)
    assert trained.returncode == 0, trained.stderr
    export_run(tmp_path / "grpo/run", tmp_path / "final", dtype="float32")

    (after_sft,) = metrics_of(tmp_path / "sft/run", "eval")
    before_grpo, after_grpo = metrics_of(tmp_path / "grpo/run", "eval")
    name = "eval/sorted/pass@1"
    assert after_sft[name] > 0.1
    assert before_grpo[name] == after_sft[name]
    assert after_grpo[name] > after_sft[name]
    outside = exact_match(tmp_path / "final", tmp_path / "grpo/task/eval.jsonl")
    assert abs(outside - after_grpo[name]) < 0.01
