"""A recorded step can be taken again, with other settings, and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trainer_testkit import make_group, tiny_llama

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import DataError
from rollmill.sample_codec import encode_group, row_schema, sample_to_row
from rollmill.trainer.replay import read_groups, replay
from rollmill.trainer.worker import TorchTrainer

ARGUMENTS: dict[str, Any] = {
    "step": 1,
    "reward_key": None,
    "max_new_tokens": 8,
    "temperature": 1.0,
    "num_total_steps": 4,
    "context_length": 64,
}


def config(**algorithm: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"num_threads": 1, "algorithm": algorithm})


def test_a_step_replayed_as_it_was_is_the_same(
    save_model: Callable[..., str], tmp_path: Path, rng: np.random.Generator
) -> None:
    groups = [make_group(i, [1.0, 0.0, 0.5], rng=rng, log_prob=-4.0) for i in (4, 2)]
    table = pa.Table.from_pylist(
        [sample_to_row(sample) for group in groups for sample in group.samples], row_schema()
    )
    pq.write_table(table, tmp_path / "step.parquet")
    path = save_model(tiny_llama())
    trainer = TorchTrainer(
        config=config().model_dump(mode="json"),
        model_path=path,
        seed=0,
        num_total_steps=4,
        context_length=64,
    )
    train = {k: v for k, v in ARGUMENTS.items() if k not in ("num_total_steps", "context_length")}
    encoded = [encode_group(group) for group in groups]
    trainer.train(encoded, **{**train, "step": 0})
    trainer.save(str(tmp_path / "state"))
    metrics = trainer.train(encoded, **train)

    read = read_groups(tmp_path / "step.parquet")
    assert read == groups
    report = replay(
        read, config(), config(), model_path=path, state=tmp_path / "state", **ARGUMENTS
    )
    assert report.differences() == []
    assert report.update_cosine == pytest.approx(1)
    assert report.recorded["loss/total"] == metrics["loss/total"]
    assert report.recorded["optimizer/grad_norm"] == metrics["optimizer/grad_norm"]


def test_another_estimator_shows_what_it_changes(
    save_model: Callable[..., str], rng: np.random.Generator
) -> None:
    groups = [make_group(i, [1.0, 0.0, 0.5], rng=rng) for i in range(2)]
    path = save_model(tiny_llama())
    report = replay(groups, config(), config(advantage="dr_grpo"), model_path=path, **ARGUMENTS)
    names = {name for name, _, _ in report.differences()}
    assert {"advantage/max_abs", "optimizer/grad_norm"} <= names
    assert "reward/mean" not in names
    filtered = replay(
        groups, config(), config(), model_path=path, changed_groups=groups[:1], **ARGUMENTS
    )
    assert ("groups/count", 2.0, 1.0) in filtered.differences()
    assert filtered.update_cosine < 0.99


def test_a_missing_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="step_9"):
        read_groups(tmp_path / "step_9.parquet")
