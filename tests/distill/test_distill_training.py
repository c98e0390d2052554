"""Whole distillations, recorded and live: the student comes closer to its teacher."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from distill_helpers import World, config_of, plain_config, prepare_now

from rollmill.distill.measure import load_model, reverse_kl
from rollmill.errors import DataError
from rollmill.loop.distill import check_recorded_scores, open_recorded_source
from rollmill.loop.export import export_run
from rollmill.loop.policy import open_policy, start_trainer
from rollmill.loop.run_dir import RunDir
from rollmill.telemetry.samples import read_samples
from support.tiny import EOS, MAX_NEW_TOKENS, VOCABULARY
from support.tiny_run import metrics_of, rollmill

STEPS = 16


def write_config(world: World, folder: Path, **changes: Any) -> Path:
    path = folder / "config.yaml"
    values = plain_config(world, run__dir=str(folder / "run"), run__num_steps=STEPS, **changes)
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def divergence(world: World, student: Path) -> float:
    """Reverse KL per answer on fresh answers to held-out prompts."""
    rows = [json.loads(line) for line in world.files.eval.read_text().splitlines()]
    prompts = [[VOCABULARY.index(c) for c in f"{row['prompt']}>"] for row in rows] * 2
    end = [VOCABULARY.index(EOS)]
    return reverse_kl(
        load_model(student),
        load_model(world.teacher),
        prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        end_ids=end,
    ).per_answer


def test_recorded_answers_bring_the_student_to_its_teacher_without_engines(
    world: World, tmp_path: Path
) -> None:
    data = tmp_path / "recorded"
    sizes = {"num_prompts": 256, "prompts_per_shard": 256}
    prepare_now(world, config_of(world, opd__data=str(data), opd__prepare=sizes))
    nobody = {"url": "http://127.0.0.1:9"}
    config = write_config(
        world, tmp_path, opd__data=str(data), opd__prepare=sizes, opd__teacher=nobody,
        rollout__batch_size=32, engine__urls=["http://127.0.0.1:9"],
    )  # fmt: skip

    finished = rollmill("train", config)

    assert finished.returncode == 0, finished.stderr
    trained = metrics_of(tmp_path / "run", "train")
    assert len(trained) == STEPS
    assert trained[0]["train/opd/importance_mean"] == pytest.approx(1, abs=1e-3)
    assert trained[0]["opd/mismatch_allowed"] == 0
    assert "train/policy/teacher_clip_fraction" in trained[0]
    export_run(tmp_path / "run", tmp_path / "exported", dtype="float32")
    before, after = divergence(world, world.student), divergence(world, tmp_path / "exported")
    assert after < 0.75 * before


def test_a_live_teacher_brings_the_student_to_itself_and_rewards_are_still_logged(
    world: World, tmp_path: Path
) -> None:
    config = write_config(
        world,
        tmp_path,
        opd__mode="live",
        rollout__batch_size=32,
        reward__function=world.files.reward_function,
        engine={"embedded": {"num_threads": 1}},
    )

    finished = rollmill("train", config)

    assert finished.returncode == 0, finished.stderr
    trained = metrics_of(tmp_path / "run", "train")
    assert len(trained) == STEPS
    assert any(record["reward/mean"] > 0 for record in trained)
    assert max(record["train/mismatch/log_prob_diff_max"] for record in trained) < 1e-4
    samples = read_samples(tmp_path / "run" / "samples" / "step_000001.parquet")
    assert all(
        s.teacher_log_probs is not None and len(s.teacher_log_probs) == s.response_length
        for s in samples
    )
    export_run(tmp_path / "run", tmp_path / "exported", dtype="float32")
    before, after = divergence(world, world.student), divergence(world, tmp_path / "exported")
    assert after < 0.75 * before


def test_evaluation_generates_and_never_grades_recorded_answers(
    world: World, prepared: Path, tmp_path: Path
) -> None:
    sets = [{"name": "sorted", "data": {"path": str(world.files.eval), "max_rows": 8}}]
    config = write_config(
        world,
        tmp_path,
        opd__data=str(prepared),
        eval={"datasets": sets, "at_start": False},
        reward__function=world.files.reward_function,
        engine={"embedded": {"num_threads": 1}},
    )
    finished = rollmill("train", config, "run.num_steps=1")
    assert finished.returncode == 0, finished.stderr
    (answers,) = (tmp_path / "run" / "eval" / "sorted").glob("*.parquet")
    samples = read_samples(answers)
    assert {version for s in samples for version in s.weight_versions} == {1}
    assert {s.prompt for s in samples} == {
        json.loads(line)["prompt"] for line in world.files.eval.read_text().splitlines()[:8]
    }


def test_a_run_whose_weights_score_the_rows_otherwise_is_refused_at_its_start(
    world: World, prepared: Path, tmp_path: Path
) -> None:
    """The hash is allowed to differ, the log-probs still are not."""
    config = config_of(
        world,
        opd__data=str(prepared),
        model__path=str(world.teacher),
        opd__allow_mismatch=["student"],
        run__dir=str(tmp_path / "run"),
    )

    async def start() -> None:
        policy = open_policy(config)
        source = open_recorded_source(config, policy)
        async with AsyncExitStack() as stack:
            place = RunDir(config.run.dir)
            trainer = await start_trainer(stack, config, policy, place, tmp_path)
            await check_recorded_scores(trainer, source, config)

    with pytest.raises(DataError, match="not those of the starting weights") as error:
        asyncio.run(start())
    assert re.search(r"shard_0000\d.parquet:\d+: mean", str(error.value))
