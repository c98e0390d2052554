"""`rollmill check` looks at recorded answers as the start of a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distill_helpers import World, config_of, spoil

from rollmill.checks.distillation import check_distillation
from rollmill.checks.finding import Finding, Level
from rollmill.errors import DataError
from rollmill.loop.policy import open_policy


def findings(world: World, folder: Path, **changes: Any) -> list[Finding]:
    config = config_of(world, opd__data=str(folder), **changes)
    return list(check_distillation(config, open_policy(config)))


def test_good_answers_are_counted(world: World, prepared: Path) -> None:
    (found,) = findings(world, prepared)
    assert found.level is Level.OK
    assert "96 recorded answers to 48 prompts" in found.text


def test_answers_that_are_not_there_yet_are_an_error(world: World, tmp_path: Path) -> None:
    (found,) = findings(world, tmp_path / "nothing")
    assert found.level is Level.ERROR
    assert "does not exist yet" in found.text


def test_an_allowed_mismatch_is_a_warning(world: World, prepared: Path) -> None:
    changes = {"model__path": str(world.teacher), "opd__allow_mismatch": ["student"]}
    _, warning = findings(world, prepared, **changes)
    assert warning.level is Level.WARNING
    assert "student differs" in warning.text


def test_spoilt_answers_are_refused(world: World, copy: Path) -> None:
    spoil(copy, lambda rows: rows[3].update(teacher_log_probs=[]))
    with pytest.raises(DataError, match="shard_00001"):
        findings(world, copy)


def test_other_runs_have_nothing_to_check(world: World, prepared: Path) -> None:
    off = {"opd__mode": "off", "rollout__source": "generate"}
    assert findings(world, prepared, **off) == []
