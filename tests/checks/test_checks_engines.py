"""Engines that run already: reachable, the same model and tokenizer; and what memory is for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from scripted_engine import ScriptedEngine

from rollmill.checks.engines import check_engine_urls, check_texts
from rollmill.checks.finding import Finding, Level
from rollmill.checks.machine import memory_estimate
from rollmill.config.load import load_config
from rollmill.loop.policy import Policy, open_policy
from rollmill.sample import Sample, Segment
from support.tiny import CHARACTERS, VOCABULARY, make_tokenizer
from support.tiny_run import write_tiny_run


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("checks"))


@pytest.fixture(scope="module")
def policy(path: Path) -> Policy:
    return open_policy(load_config(path))


def test_each_engine_is_asked_what_it_serves(path: Path, policy: Policy) -> None:
    async def ask() -> list[Finding]:
        async with ScriptedEngine() as engine:
            config = load_config(path, [f"engine.urls=[{engine.url}, http://127.0.0.1:9]"])
            return await asyncio.to_thread(lambda: list(check_engine_urls(config, policy)))

    other, gone = asyncio.run(ask())
    assert (other.level, gone.level) == (Level.WARNING, Level.ERROR)
    assert str(policy.folder) in other.text
    assert "does not answer" in gone.text
    assert not list(check_engine_urls(load_config(path), policy)), "nothing to ask"


def test_weights_go_by_handle_on_one_machine_only(path: Path, policy: Policy) -> None:
    urls = "engine.urls=[http://127.0.0.1:9, http://elsewhere.invalid:9]"
    config = load_config(path, [urls, "weights.transport=tensor"])
    first, *rest = check_engine_urls(config, policy)
    assert first.level is Level.ERROR
    assert "elsewhere.invalid" in first.text
    assert len(rest) == 2  # neither answers


def sample(text: str, told: str | None = None) -> Sample:
    ids = [VOCABULARY.index(character) for character in text] + [VOCABULARY.index("<eos>")]
    segment = Segment.from_engine(ids, np.zeros(len(ids)), 0)
    return Sample([5], segments=[segment], response=text if told is None else told)


def texts(*samples: Sample, has_stop_texts: bool = False) -> Finding:
    (finding,) = check_texts(make_tokenizer(), samples, has_stop_texts=has_stop_texts)
    return finding


def test_an_engine_with_another_tokenizer_is_found() -> None:
    assert texts(sample("123"), sample("45")).level is Level.OK
    shifted = "".join(CHARACTERS[(CHARACTERS.index(c) + 1) % len(CHARACTERS)] for c in "123")
    found = texts(sample("45"), sample("123", shifted))
    assert found.level is Level.ERROR
    assert "'234'" in found.text
    assert "'123'" in found.text


def test_texts_that_end_early_for_a_reason_are_the_same() -> None:
    assert texts(sample("12,", "12"), has_stop_texts=True).level is Level.OK
    assert texts(sample("12,", "12")).level is Level.ERROR
    assert texts(sample("12", "12\ufffd")).level is Level.OK
    assert "not compared" in texts(sample("12", "")).text


def test_memory_counts_every_model_that_is_held(path: Path, policy: Policy) -> None:
    def trainer_bytes(*overrides: str) -> int:
        return memory_estimate(load_config(path, list(overrides)), policy)["trainer"]

    plain = trainer_bytes()
    reference = trainer_bytes("trainer.algorithm.kl_coef=0.1") - plain
    critic = trainer_bytes("trainer.algorithm.advantage=ppo") - plain
    assert critic == 4 * reference, "weights alone, or weights, gradients and two moments"
    lora = trainer_bytes("trainer.lora={rank: 1}")
    assert lora < plain
    assert trainer_bytes("trainer.lora={rank: 1}", "trainer.algorithm.kl_coef=0.1") == lora
