"""Planted mistakes, and what `rollmill check` says of each."""

import json
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollmill.checks.finding import Finding, Level
from rollmill.checks.report import check_all
from support.tiny_run import rollmill, write_tiny_run


@dataclass(frozen=True)
class Mistake:
    """Overrides that plant it, and what the report must say."""

    name: str
    overrides: tuple[str, ...]
    level: Level
    subject: str
    says: str


E, W = Level.ERROR, Level.WARNING

TEACHER_ALONE = ("opd={mode: live, teacher: {path: model}}", "reward={}")

MISTAKES = [
    Mistake("misspelled field", ("rollout.batchsize=4",), E, "config", "rollout.batchsize"),
    Mistake("wrong section", ("rollout.lr=4",), E, "config", "no such field"),
    Mistake("one answer", ("rollout.n_samples_per_prompt=1",), E, "config", "2 or more"),
    Mistake("uneven split", ("trainer.global_batch_size=100",), E, "config", "divisor"),
    Mistake("greedy", ("rollout.sampling.temperature=0",), E, "config", "more than 0"),
    Mistake("out of range", ("rollout.sampling.top_p=2",), E, "config", "≤ 1"),
    Mistake(
        "two names",
        (
            "eval.datasets=[{name: a, data: {path: task/eval.jsonl}}, "
            "{name: a, data: {path: task/eval.jsonl}}]",
        ),
        E,
        "config",
        "two sets have the name",
    ),
    Mistake("missing model", ("model.path=nowhere",), E, "model", "does not exist"),
    Mistake("context too long", ("model.context_length=64",), E, "model", "at most 32"),
    Mistake("missing data", ("data.path=task/none.jsonl",), E, "data", "none.jsonl"),
    Mistake("wrong key", ("data.prompt_key=question",), E, "data", "question"),
    Mistake("missing eval", ("eval.datasets.0.data.path=no.jsonl",), E, "eval sorted", "no.jsonl"),
    Mistake("bad row", ("data.path=bad.jsonl",), E, "data", "bad.jsonl:2"),
    Mistake("empty data", ("data.path=empty.jsonl",), E, "data", "empty.jsonl"),
    Mistake("all too long", ("data.max_prompt_tokens=2",), E, "data", "too long"),
    Mistake("missing hook", ("rollout.hooks.generate=no.py:f",), E, "functions", "no.py"),
    Mistake("wrong hook", ("rollout.filters.dynamic=wrong.py:f",), E, "functions", "def f(a, b)"),
    Mistake(
        "missing reference",
        ("trainer.reference_model=nowhere", "trainer.algorithm.kl_coef=0.1"),
        E,
        "functions",
        "trainer.reference_model",
    ),
    Mistake("unknown loss", ("trainer.algorithm.loss=ppo",), E, "functions", "one of ppo_clip"),
    Mistake("no reward", ("reward.function=null",), E, "reward", "nothing says how"),
    Mistake("half a path", ("reward.function=task/reward.py",), E, "functions", "task/reward.py"),
    Mistake(
        "misspelled setting",
        ("reward={type: math, params: {requirebox: true}}",),
        E,
        "reward",
        "requirebox",
    ),
    Mistake("address without http", ("engine.urls=[localhost:9]",), E, "config", "http://HOST"),
    Mistake("missing reward", ("reward.function=task/reward.py:rewrad",), E, "reward", "rewrad"),
    Mistake("reward that disagrees", ("reward.function=never.py:reward",), E, "reward", "gets 0.0"),
    Mistake("reward too kind", ("reward.function=always.py:reward",), W, "reward", "full marks"),
    Mistake(
        "held-out overlap",
        ("eval.datasets.0.data.path=task/train.jsonl",),
        W,
        "eval sorted",
        "in the training data too",
    ),
    Mistake(
        "copies", ("data.path=[task/train.jsonl, task/train.jsonl]",), W, "data", "more than once"
    ),
    Mistake("tiny data", ("data.path=task/train.jsonl@[:3]",), W, "data", "less than one batch"),
    Mistake("no room", ("rollout.sampling.max_new_tokens=30",), W, "context", "less room"),
    Mistake("cut sampling", ("rollout.sampling.top_k=5",), W, "rollout.sampling", "biased"),
    Mistake(
        "penalty", ("rollout.sampling.repetition_penalty=1.2",), W, "rollout.sampling", "penalties"
    ),
    Mistake("hot", ("rollout.sampling.temperature=3",), W, "rollout.sampling.temperature", "3"),
    Mistake("high lr", ("trainer.optimizer.lr=1e-2",), W, "trainer.optimizer.lr", "high"),
    Mistake(
        "mixed precision",
        ("engine.embedded.dtype=bfloat16",),
        W,
        "engine.embedded.dtype",
        "log-probs differ",
    ),
    Mistake(
        "long warm-up",
        ("trainer.optimizer.warmup_steps=99",),
        W,
        "trainer.optimizer.warmup_steps",
        "never reached",
    ),
    Mistake(
        "idle partial",
        ("rollout.partial_rollout=true",),
        W,
        "rollout.partial_rollout",
        "nothing is ever unfinished",
    ),
    Mistake(
        "stale and uncorrected",
        ("rollout.asynchronous=true", "rollout.max_staleness=2"),
        W,
        "trainer.algorithm.importance_correction",
        "older weights",
    ),
    Mistake(
        "nothing to mask",
        ("rollout.asynchronous=true", "rollout.mask_off_policy=true"),
        W,
        "rollout.mask_off_policy",
        "nothing to mask",
    ),
    Mistake(
        "greedy and many",
        ("eval.datasets.0.n_samples_per_prompt=4",),
        W,
        "eval.datasets.sorted",
        "pass@k is pass@1",
    ),
    Mistake(
        "nothing to choose from",
        ("rollout.filters.over_sampling=by_reward_std",),
        W,
        "rollout.filters.over_sampling",
        "nothing to choose from",
    ),
    Mistake(
        "teacher alone and a filter",
        (*TEACHER_ALONE, "rollout.filters.dynamic=nonzero_std"),
        W,
        "rollout.filters",
        "every group is rejected (zero_std_0)",
    ),
    Mistake(
        "teacher alone and a bound",
        (*TEACHER_ALONE, "rollout.filters.min_mean_reward=0.1"),
        W,
        "rollout.filters",
        "every group is rejected (mean_reward_low)",
    ),
    Mistake("no evaluation", ("eval.datasets=[]",), W, "eval.datasets", "no evaluation"),
    Mistake("never saved", ("run.num_steps=100",), W, "run.save_every", "nothing is saved"),
    Mistake(
        "engine gone", ("engine.urls=[http://127.0.0.1:9]",), E, "engine.urls", "does not answer"
    ),
    Mistake("threads", ("trainer.num_threads=999",), W, "trainer.num_threads", "999 threads"),
    Mistake("full disk", ("run.num_steps=1000000000",), W, "disk", "samples at most"),
    Mistake("memory", ("engine.embedded.max_total_tokens=100000000000",), E, "memory", "GiB"),
]


REPLAY = (
    "rollout.source=replay",
    "rollout.n_samples_per_prompt=1",
    "trainer.algorithm.advantage=none",
    "trainer.algorithm.loss=sft",
    "data.apply_chat_template=false",
    "data.sft={response_key: answer}",
)
RECORDED_MISTAKES = [
    Mistake("no answer", ("data.path=task/train.jsonl",), E, "data", "no field 'answer'"),
    Mistake("long answer", ("data.path=answers.jsonl",), E, "data", "answers.jsonl:3"),
    Mistake(
        "many left out",
        ("data.path=answers.jsonl", "data.sft={response_key: answer, too_long: skip}"),
        W,
        "data",
        "33% of the samples",
    ),
    Mistake("copies of answers", ("data.path=twice.jsonl",), W, "data", "more than once"),
    Mistake("few answers", ("data.path=twice.jsonl",), W, "data", "less than one batch"),
    Mistake("asked and taught", ("data.path=asked.jsonl",), W, "eval sorted", "training data too"),
    Mistake(
        "another end",
        ("data.path=ended.jsonl", "model.path=padded", "data.apply_chat_template=true"),
        W,
        "end of turn",
        "1 answers end with '<pad>' (0), on which engines do not stop",
    ),
]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}>{{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    write_tiny_run(folder, run__num_steps=20)
    rows = [json.dumps({"prompt": "12345", "label": "12345"}), '{"prompt": 1']
    (folder / "bad.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "wrong.py").write_text("def f(a, b):\n    return True\n")
    (folder / "never.py").write_text("def reward(sample):\n    return 0.0\n")
    (folder / "always.py").write_text("def reward(sample):\n    return 1.0\n")
    return folder


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Path:
    """The same folder, with files of recorded answers, one per mistake."""
    asked = json.loads((folder / "task" / "eval.jsonl").read_text().splitlines()[0])["prompt"]
    files = {
        "answers": [("12>", "12"), ("21>", "12"), ("1>", "1" * 40)],
        "twice": [("12>", "12"), ("12>", "12")],
        "asked": [(asked + ">", "0")],
        "ended": [("12", "12")],
    }
    for name, rows in files.items():
        lines = [json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    shutil.copytree(folder / "model", folder / "padded")
    template = TEMPLATE.replace("eos_token", "pad_token")
    (folder / "padded" / "chat_template.jinja").write_text(template)
    return folder


def findings(folder: Path, *overrides: str) -> list[Finding]:
    return list(check_all(folder / "config.yaml", list(overrides), is_live=False))


def test_a_right_set_up_has_no_finding(folder: Path) -> None:
    found = findings(folder)
    complaints = [f.subject for f in found if f.level is not Level.OK]
    assert complaints == ["chat template"], "the tiny template drops its `>` once answered"
    assert {"batch", "data", "reward", "memory", "disk", "tokenizer"} <= {f.subject for f in found}


def test_a_teacher_alone_needs_no_reward(folder: Path) -> None:
    found = findings(folder, *TEACHER_ALONE)
    assert [f for f in found if f.level is Level.ERROR] == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_planted_mistake_is_found_and_says_what_to_do(folder: Path, mistake: Mistake) -> None:
    found = [
        f
        for f in findings(folder, *mistake.overrides)
        if f.level is mistake.level and f.subject == mistake.subject and mistake.says in f.text
    ]
    assert found, [f for f in findings(folder, *mistake.overrides) if f.level is not Level.OK]
    assert found[0].fix, "the report says what to do"


@pytest.mark.parametrize("mistake", RECORDED_MISTAKES, ids=lambda m: m.name)
def test_a_mistake_in_recorded_answers_is_found(recorded: Path, mistake: Mistake) -> None:
    overrides = [text.replace("=padded", f"={recorded}/padded") for text in mistake.overrides]
    found = findings(recorded, *REPLAY, *overrides)
    assert [
        f
        for f in found
        if f.level is mistake.level and f.subject == mistake.subject and mistake.says in f.text
    ], [f for f in found if f.level is not Level.OK]


def test_recorded_answers_are_shown_with_what_is_learned_of_them(recorded: Path) -> None:
    found = findings(recorded, *REPLAY, "data.path=twice.jsonl")
    texts = {f.subject: f.text for f in found if f.level is Level.OK}
    assert "'12>⟦12<eos>⟧'" in texts["mask"]
    assert "2 samples from 2 rows, 6 of 12 tokens learned" in texts["data"]


def test_a_port_in_use_is_found(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = findings(folder, f"engine.port={taken.getsockname()[1]}")
    assert [f.subject for f in found if f.level is Level.ERROR] == ["engine.port"]


def test_a_tokenizer_of_another_model_is_found(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for number in range(1000, 1100):
        tokenizer["model"]["vocab"][f"extra{number}"] = number
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = findings(folder, f"model.path={model}")
    assert any(f.level is Level.ERROR and "another model" in f.text for f in found)


def test_the_command_starts_everything_and_compares_log_probs(folder: Path) -> None:
    checked = rollmill("check", folder / "config.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "engine and trainer differ by" in checked.stdout
    assert "version 1 confirmed, checksums agree" in checked.stdout
    assert "answers as the trainer's does" in checked.stdout
    assert "0 errors, 1 warning" in checked.stdout
    assert not (folder / "run").exists(), "a check leaves the run folder alone"


def test_the_command_fails_when_there_is_an_error(folder: Path) -> None:
    checked = rollmill("check", folder / "config.yaml", "--no-live", "model.path=nowhere")
    assert checked.returncode == 1
    assert "1 error, " in checked.stdout
