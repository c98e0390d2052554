"""Preparing: killed at any moment, it goes on behind the last finished shard with the same rows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from distill_helpers import NUM_PROMPTS, World, config_of, plain_config, prepare_now, spoil

from rollmill.distill.manifest import read_manifest
from rollmill.distill.shards import file_hash
from rollmill.errors import ConfigError, DataError
from support.tiny_run import quiet_environment

KILLED_AT = "shard 2 of 3: student scores: 32 answers"


def write_config(world: World, folder: Path, data: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(plain_config(world, opd__data=str(data))), encoding="utf-8")
    return path


def test_a_killed_preparation_keeps_its_shards_and_writes_the_same_rows(
    world: World, prepared: Path, tmp_path: Path
) -> None:
    data = tmp_path / "killed"
    command = [sys.executable, "-m", "rollmill.cli", "distill", "prepare"]
    command += [str(write_config(world, tmp_path, data))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**quiet_environment(), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.strip() == KILLED_AT:
            process.kill()
    process.wait()
    assert KILLED_AT in lines, lines
    assert not read_manifest(data).is_complete
    first = data / "shard_00000.parquet"
    was_written = first.stat().st_mtime_ns
    num_done = len(list(data.glob("*.parquet")))
    assert 1 <= num_done < 3

    manifest = prepare_now(world, config_of(world, opd__data=str(data)))

    assert manifest.is_complete
    assert first.stat().st_mtime_ns == was_written, "a finished shard was done again"
    undisturbed = read_manifest(prepared)
    for shard in undisturbed.shards:
        mine, other = pq.read_table(data / shard.name), pq.read_table(prepared / shard.name)
        for name in ("prompt_tokens", "response_tokens", "finish_reason", "prompt_index"):
            assert mine[name].to_pylist() == other[name].to_pylist()
    assert not list(data.glob("*.tmp"))


def test_a_finished_preparation_is_left_as_it_is(world: World, copy: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in copy.glob("*.parquet")}
    manifest = prepare_now(world, config_of(world, opd__data=str(copy)))
    assert {p.name: p.stat().st_mtime_ns for p in copy.glob("*.parquet")} == before
    assert [shard.sha256 for shard in manifest.shards] == [
        file_hash(copy / shard.name) for shard in manifest.shards
    ]


def test_a_shard_that_cannot_be_written_says_where_and_leaves_nothing(
    world: World, copy: Path
) -> None:
    shard = copy / "shard_00001.parquet"
    shard.unlink()
    (copy / "shard_00001.tmp").mkdir()  # in the way of the file to be written
    with pytest.raises(DataError, match="cannot be written") as error:
        prepare_now(world, config_of(world, opd__data=str(copy)))
    assert error.value.where == str(shard)
    (copy / "shard_00001.tmp").rmdir()
    assert prepare_now(world, config_of(world, opd__data=str(copy))).is_complete


def test_a_damaged_shard_is_done_again_and_the_others_are_not(world: World, copy: Path) -> None:
    damaged, good = copy / "shard_00001.parquet", copy / "shard_00002.parquet"
    answers = pq.read_table(damaged)["response_tokens"].to_pylist()
    damaged.write_bytes(damaged.read_bytes()[:-100])
    was_written = good.stat().st_mtime_ns
    prepare_now(world, config_of(world, opd__data=str(copy)))
    assert pq.read_table(damaged)["response_tokens"].to_pylist() == answers
    assert good.stat().st_mtime_ns == was_written


@pytest.mark.parametrize("is_another_shard", [False, True])
def test_a_shard_of_other_answers_than_its_own_is_done_again(
    world: World, copy: Path, is_another_shard: bool
) -> None:
    """Its rows are good and of the same settings; only they are not all, or another shard's."""
    shard = copy / "shard_00001.parquet"
    answers = pq.read_table(shard)["response_tokens"].to_pylist()
    if is_another_shard:
        shutil.copy(copy / "shard_00000.parquet", shard)
    else:
        spoil(copy, lambda rows: rows.pop(1))
    manifest = prepare_now(world, config_of(world, opd__data=str(copy)))
    assert pq.read_table(shard)["response_tokens"].to_pylist() == answers
    assert sum(entry.num_rows for entry in manifest.shards) == 2 * NUM_PROMPTS


def write_rows(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The `data` section of a file with these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(path)}


@pytest.mark.parametrize("change", [{"label": "other"}, {"metadata": {"teacher": "b"}}])
def test_what_the_data_says_beside_a_prompt_is_a_setting_too(
    world: World, tmp_path: Path, change: dict[str, Any]
) -> None:
    """It goes into the rows, and decides who scores them."""
    row = {"prompt": "312", "label": "123"}
    teacher = {"url": world.teacher_url}
    changes: dict[str, Any] = {
        "opd__data": str(tmp_path / "new"),
        "opd__teachers": {"b": teacher},
        "data": write_rows(tmp_path / "rows.jsonl", [row]),
    }
    prepare_now(world, config_of(world, **changes))
    write_rows(tmp_path / "rows.jsonl", [row | change])
    with pytest.raises(ConfigError, match="prepared with other settings") as error:
        prepare_now(world, config_of(world, **changes))
    assert str(error.value.expected).startswith("prompts: ")


def test_prompts_with_images_are_refused_before_an_answer_is_drawn(
    world: World, tmp_path: Path
) -> None:
    rows = [{"prompt": "312", "label": ""}, {"prompt": "21", "label": "", "images": ["a.png"]}]
    changes: dict[str, Any] = {
        "opd__data": str(tmp_path / "new"),
        "data": write_rows(tmp_path / "rows.jsonl", rows),
    }
    with pytest.raises(DataError, match="with images cannot be prepared") as error:
        prepare_now(world, config_of(world, **changes))
    assert error.value.where == f"{tmp_path / 'rows.jsonl'}:2"
    assert not (tmp_path / "new").exists()
    changes["data"]["images_key"] = None
    assert prepare_now(world, config_of(world, **changes)).is_complete


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"run__seed": 1}, "seed: 0"),
        ({"rollout__sampling__max_new_tokens": 4}, "sampling: "),
        ({"opd__prepare": {"num_prompts": 40, "prompts_per_shard": 16}}, "num_prompts: 48"),
    ],
)
def test_other_settings_do_not_mix_with_what_is_there(
    world: World, copy: Path, changes: dict[str, object], name: str
) -> None:
    with pytest.raises(ConfigError, match="prepared with other settings") as error:
        prepare_now(world, config_of(world, opd__data=str(copy), **changes))
    assert name in str(error.value.expected)


def test_the_manifest_says_who_and_how_much(world: World, prepared: Path) -> None:
    manifest = read_manifest(prepared)
    rows = [pq.read_table(prepared / shard.name).to_pylist() for shard in manifest.shards]
    num_tokens = sum(len(row["response_tokens"]) for shard in rows for row in shard)
    assert sum(len(shard) for shard in rows) == 2 * NUM_PROMPTS
    assert manifest.generated_tokens == num_tokens
    assert manifest.teacher_tokens == manifest.student_tokens == num_tokens
    assert set(manifest.seconds) == {"generate", "student", "teacher"}
    assert manifest.settings.sampling["temperature"] == 1.0
    assert manifest.settings.student != manifest.settings.teachers[""]


def test_an_engine_that_serves_other_weights_than_the_student_is_refused(
    world: World, tmp_path: Path
) -> None:
    config = config_of(world, opd__data=str(tmp_path / "new"), engine__urls=[world.teacher_url])
    with pytest.raises(ConfigError, match="serves other weights"):
        prepare_now(world, config)
    assert not list((tmp_path / "new").glob("*.parquet"))
