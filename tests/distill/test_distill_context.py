"""How long answers may be, so that every engine that scores them can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill.config import Config
from rollmill.config.load import parse_config
from rollmill.errors import ConfigError
from rollmill.loop.policy import open_policy
from rollmill.loop.teachers import scorable_length, training_length
from support.tiny import CONTEXT_LENGTH, make_tiny_model


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("student"), hidden_size=32, layers=1)


@pytest.fixture(scope="module")
def short_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("teacher"), hidden_size=32, layers=1)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_LENGTH - 8
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def live(student: Path, teacher: dict[str, Any], **model: Any) -> Config:
    values = {
        "model": {"path": str(student), **model},
        "data": {"path": "unused.jsonl"},
        "trainer": {"algorithm": {"advantage": "none", "loss": "policy_gradient"}},
        "opd": {"mode": "live", "teacher": teacher},
    }
    return parse_config(values, where="the test")


def test_an_engine_scores_inputs_that_are_shorter_than_its_context(
    student: Path, short_teacher: Path
) -> None:
    config = live(student, {"path": str(short_teacher)})
    assert training_length(config, open_policy(config)) == CONTEXT_LENGTH - 9
    alike = live(student, {"path": str(student)})
    assert training_length(alike, open_policy(alike)) == CONTEXT_LENGTH - 1
    short = live(student, {"path": str(short_teacher)}, context_length=16)
    assert training_length(short, open_policy(short)) == 16


def test_a_context_that_could_not_be_scored_is_refused(student: Path, short_teacher: Path) -> None:
    fits = live(student, {"path": str(short_teacher)}, context_length=CONTEXT_LENGTH - 9)
    assert training_length(fits, open_policy(fits)) == CONTEXT_LENGTH - 9
    config = live(student, {"path": str(short_teacher)}, context_length=CONTEXT_LENGTH - 8)
    with pytest.raises(ConfigError, match="could not be scored") as error:
        training_length(config, open_policy(config))
    assert error.value.expected == f"at most {CONTEXT_LENGTH - 9}"


def test_the_shortest_of_all_scoring_engines_counts(student: Path, short_teacher: Path) -> None:
    config = live(student, {"url": "http://127.0.0.1:9"})
    policy = open_policy(config)
    assert training_length(config, policy) == CONTEXT_LENGTH
    assert scorable_length(config, policy, [student, None, short_teacher]) == CONTEXT_LENGTH - 9
