"""What recorded answers must not be: each refused with the file, the row and what is wrong."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distill_helpers import World, config_of, open_answers, prepare_now, spoil

from rollmill.config import Config
from rollmill.config.load import parse_config
from rollmill.distill.identity import tokenizer_identity, weights_hash
from rollmill.distill.manifest import FILE_NAME, read_manifest, write_manifest
from rollmill.distill.recording import check_scores
from rollmill.errors import ConfigError, DataError
from rollmill.loop.distill import mismatch_metrics
from rollmill.loop.ready import read_and_check
from support.tiny import make_tiny_model, make_tokenizer

Rows = list[dict[str, Any]]


def change_settings(folder: Path, **changes: Any) -> None:
    manifest = read_manifest(folder)
    settings = msgspec.structs.replace(manifest.settings, **changes)
    write_manifest(folder, msgspec.structs.replace(manifest, settings=settings))


def test_good_answers_are_taken(world: World, prepared: Path) -> None:
    source = open_answers(world, prepared)
    assert len(source) == 48
    assert source.recording.allowed == ()


# -- the models ----------------------------------------------------------------------------------


def test_another_teacher_than_that_of_sft_is_refused(world: World, copy: Path) -> None:
    change_settings(copy, sft_teacher="sha256:somebody else")
    with pytest.raises(ConfigError, match="teacher of the SFT data is not the teacher") as error:
        open_answers(world, copy)
    assert error.value.expected == "sha256:somebody else"
    assert error.value.found == weights_hash(world.teacher)
    assert "opd.allow_mismatch: [teacher]" in str(error.value.fix)


def test_an_unknown_sft_teacher_is_refused_and_not_assumed(world: World, copy: Path) -> None:
    change_settings(copy, sft_teacher=None)
    with pytest.raises(ConfigError, match="nobody says which teacher"):
        open_answers(world, copy)


def test_preparing_with_another_teacher_is_refused_before_an_answer_is_drawn(
    world: World, tmp_path: Path
) -> None:
    config = config_of(world, opd__data=str(tmp_path / "new"), opd__sft_teacher=str(world.student))
    with pytest.raises(ConfigError, match="teacher of the SFT data"):
        prepare_now(world, config)
    assert not list((tmp_path / "new").glob("*.parquet"))


def test_other_starting_weights_than_the_sampled_ones_are_refused(
    world: World, prepared: Path
) -> None:
    with pytest.raises(ConfigError, match="starts from other weights") as error:
        open_answers(world, prepared, model__path=str(world.teacher))
    assert error.value.expected == weights_hash(world.student)


def test_another_tokenizer_is_refused(world: World, copy: Path) -> None:
    other = make_tokenizer()
    other.add_tokens(["ab"])
    change_settings(copy, tokenizer=tokenizer_identity(other))
    with pytest.raises(ConfigError, match="tokenizer is not") as error:
        open_answers(world, copy)
    assert "vocabulary" in str(error.value.expected)


def test_another_chat_template_is_refused(world: World, copy: Path) -> None:
    other = make_tokenizer()
    other.chat_template = "{{ messages }}"
    change_settings(copy, tokenizer=tokenizer_identity(other))
    with pytest.raises(ConfigError, match="chat template is not"):
        open_answers(world, copy)


def test_a_teacher_with_another_tokenizer_is_refused(world: World, tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", 3, hidden_size=32, layers=1)
    other = make_tokenizer()
    other.add_tokens(["ab"])
    other.save_pretrained(teacher)
    config = config_of(world, opd__data=str(tmp_path / "new"), opd__teacher={"path": str(teacher)})
    with pytest.raises(ConfigError, match="tokenizer is not the student's") as error:
        prepare_now(world, config)
    assert error.value.where == f"opd.teacher: {teacher}"


# -- the sampling --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value", [("temperature", 0.7), ("top_p", 0.9), ("top_k", 20), ("min_new_tokens", 3)]
)
def test_sampling_from_another_distribution_than_is_scored_is_refused(
    world: World, name: str, value: float
) -> None:
    for mode in ("live", "offline"):
        with pytest.raises(ConfigError, match=f"rollout.sampling.{name}: expected"):
            config_of(world, opd__mode=mode, **{f"rollout__sampling__{name}": value})


def test_recorded_answers_of_another_temperature_are_refused(world: World, copy: Path) -> None:
    sampling = {**read_manifest(copy).settings.sampling, "temperature": 0.7}
    change_settings(copy, sampling=sampling)
    with pytest.raises(ConfigError, match="sampled from another distribution") as error:
        open_answers(world, copy)
    assert error.value.found == "0.7"


def test_a_row_of_another_temperature_is_refused(world: World, copy: Path) -> None:
    def change(rows: Rows) -> None:
        rows[7]["sampling_json"] = json.dumps({"temperature": 0.7})

    spoil(copy, change)
    with pytest.raises(DataError, match=r"shard_00001.parquet:7: .*temperature: expected 1.0"):
        open_answers(world, copy)


def test_live_sampling_cannot_be_overridden(world: World) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature"):
        config_of(
            world,
            opd__mode="live",
            opd__allow_mismatch=["sampling"],
            rollout__sampling__temperature=0.7,
        )


# -- the rows ------------------------------------------------------------------------------------


def set_to(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(row: dict[str, Any]) -> None:
        row[name] = value(row[name])

    return change


BAD_ROWS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "too few teacher log-probs": (
        set_to("teacher_log_probs", lambda v: v[:-1]),
        "teacher_log_probs: expected 6, one per response token, found 5",
    ),
    "one teacher log-prob for all": (
        set_to("teacher_log_probs", lambda v: v[:1]),
        "teacher_log_probs: expected 6, one per response token, found 1",
    ),
    "too many student log-probs": (
        set_to("student_log_probs", lambda v: [*v, -1.0]),
        "student_log_probs: expected 6, one per response token, found 7",
    ),
    "a positive log-prob": (
        set_to("teacher_log_probs", lambda v: [*v[:2], 0.5, *v[3:]]),
        "teacher_log_probs: expected finite numbers, none above 0, found 0.5 at position 2",
    ),
    "a log-prob that is not a number": (
        set_to("sampler_log_probs", lambda v: [math.nan, *v[1:]]),
        "sampler_log_probs: expected finite numbers, none above 0, found nan at position 0",
    ),
    "an infinite log-prob": (
        set_to("teacher_log_probs", lambda v: [*v[:-1], -math.inf]),
        "found -inf at position 5",
    ),
    "a log-prob that is null": (
        set_to("teacher_log_probs", lambda v: [None, *v[1:]]),
        "found nan at position 0",
    ),
    "no teacher log-probs": (
        set_to("teacher_log_probs", lambda v: None),
        "no value for teacher_log_probs",
    ),
    "a response id outside the vocabulary": (
        set_to("response_tokens", lambda v: [*v[:-1], 48]),
        "response_tokens: expected ids from 0 to 47, found 48 at position 5",
    ),
    "a negative prompt id": (
        set_to("prompt_tokens", lambda v: [-1, *v[1:]]),
        "prompt_tokens: expected ids from 0 to 47, found -1 at position 0",
    ),
    "an empty prompt": (set_to("prompt_tokens", lambda v: []), "expected at least one, found none"),
    "too many tokens": (
        set_to("prompt_tokens", lambda v: v * 20),
        "expected at most 32 tokens in all, found 126",
    ),
    "an unknown finish reason": (
        set_to("finish_reason", lambda v: "abort"),
        "finish_reason: expected stop or length, found 'abort'",
    ),
    "other contents than were written": (
        set_to("teacher_log_probs", lambda v: [v[0] / 2, *v[1:]]),
        "the checksum is of other contents",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused(world: World, copy: Path, name: str) -> None:
    change, text = BAD_ROWS[name]
    row = -1

    def spoil_a_full_answer(rows: Rows) -> None:
        nonlocal row
        row = next(n for n, each in enumerate(rows) if len(each["response_tokens"]) == 6)
        change(rows[row])

    spoil(copy, spoil_a_full_answer)
    with pytest.raises(DataError) as error:
        open_answers(world, copy)
    assert f"shard_00001.parquet:{row}: " in str(error.value)
    assert text in str(error.value)


def test_every_refused_row_is_named(world: World, copy: Path) -> None:
    def change(rows: Rows) -> None:
        for row in rows:
            row["teacher_log_probs"] = []

    spoil(copy, change, shard=0)
    spoil(copy, change, shard=2)
    with pytest.raises(DataError) as error:
        open_answers(world, copy)
    assert "64 rows" in str(error.value)
    for number in range(32):
        assert f"shard_00000.parquet:{number}" in str(error.value)
        assert f"shard_00002.parquet:{number}" in str(error.value)


# -- the files -----------------------------------------------------------------------------------


def test_rows_that_changed_places_are_refused(world: World, copy: Path) -> None:
    spoil(copy, lambda rows: rows.reverse())
    with pytest.raises(DataError, match="not the one that was prepared"):
        open_answers(world, copy)


def test_a_missing_shard_is_refused(world: World, copy: Path) -> None:
    (copy / "shard_00002.parquet").unlink()
    with pytest.raises(DataError, match=r"cannot be read[\s\S]*shard_00002"):
        open_answers(world, copy)


@pytest.mark.parametrize("column", ["response", "prompt_json", "checksum"])
def test_a_text_that_is_no_unicode_is_a_damaged_file(world: World, copy: Path, column: str) -> None:
    """A flipped bit in a compressed page leaves a file that can be read, until somebody looks."""
    path = copy / "shard_00001.parquet"
    table = pq.read_table(path)
    flipped = pa.array([b"\xff"] * table.num_rows, pa.binary()).view(pa.string())
    number = table.schema.names.index(column)
    pq.write_table(table.set_column(number, table.schema.field(column), flipped), path)
    with pytest.raises(DataError, match=r"cannot be read[\s\S]*shard_00001"):
        open_answers(world, copy)
    assert prepare_now(world, config_of(world, opd__data=str(copy))).is_complete
    assert len(open_answers(world, copy)) == 48


def test_a_preparation_that_did_not_finish_is_refused(world: World, copy: Path) -> None:
    write_manifest(copy, msgspec.structs.replace(read_manifest(copy), is_complete=False))
    with pytest.raises(DataError, match="did not finish"):
        open_answers(world, copy)


def test_a_damaged_manifest_is_refused(world: World, copy: Path) -> None:
    (copy / FILE_NAME).write_text('{"settings": {}}')
    with pytest.raises(DataError, match="manifest of the recorded answers cannot be read"):
        open_answers(world, copy)


def test_another_number_of_answers_per_prompt_is_refused(world: World, prepared: Path) -> None:
    with pytest.raises(DataError, match="groups of the configured size"):
        open_answers(world, prepared, rollout__n_samples_per_prompt=1)


# -- the scores ----------------------------------------------------------------------------------


def test_rows_that_the_trainer_scores_differently_are_refused(world: World, prepared: Path) -> None:
    places = open_answers(world, prepared).draw(8, seed=0)
    scores = [place.read().student_log_probs.copy() for place in places]
    check_scores(places, scores, tolerance=0.05)
    scores[3] = scores[3] - np.float32(0.1)
    scores[5] = np.roll(scores[5], 1)
    with pytest.raises(DataError, match="not those of the starting weights") as error:
        check_scores(places, scores, tolerance=0.05)
    assert str(places[3]) in str(error.value)
    assert str(places[5]) in str(error.value)
    assert str(places[4]) not in str(error.value)


@pytest.mark.parametrize(
    "spoilt, text",
    [
        (lambda values: values * np.float32(np.nan), "mean |Δ log-prob| nan"),
        (lambda values: values[:1], "log-probs, found 1"),
    ],
)
def test_scores_that_are_no_numbers_or_too_few_are_refused(
    world: World, prepared: Path, spoilt: Callable[[Any], Any], text: str
) -> None:
    places = open_answers(world, prepared).draw(8, seed=0)
    scores = [place.read().student_log_probs for place in places]
    scores[2] = spoilt(scores[2])
    with pytest.raises(DataError) as error:
        check_scores(places, scores, tolerance=0.05)
    assert f"{places[2]}: " in str(error.value)
    assert text in str(error.value)


# -- overrides -----------------------------------------------------------------------------------


def test_an_override_is_explicit_and_shows_in_the_metrics(world: World, copy: Path) -> None:
    change_settings(copy, sft_teacher="sha256:somebody else", student="sha256:another")
    with pytest.raises(ConfigError, match="other weights"):
        open_answers(world, copy, opd__allow_mismatch=["teacher"])
    allowed = ["teacher", "student"]
    source = open_answers(world, copy, opd__allow_mismatch=allowed)
    config = config_of(world, opd__allow_mismatch=allowed)
    assert mismatch_metrics(config, source) == {
        "opd/mismatch_allowed": 2.0,
        "opd/mismatch_allowed/student": 1.0,
        "opd/mismatch_allowed/teacher": 1.0,
    }


def test_an_override_of_nothing_counts_as_nothing(world: World, prepared: Path) -> None:
    config = config_of(world, opd__allow_mismatch=["teacher"])
    source = open_answers(world, prepared, opd__allow_mismatch=["teacher"])
    assert mismatch_metrics(config, source) == {"opd/mismatch_allowed": 0.0}


def test_what_was_allowed_in_preparing_has_to_be_allowed_in_training(
    world: World, tmp_path: Path
) -> None:
    """The teacher's other template shows in nothing but the manifest."""
    teacher = Path(shutil.copytree(world.teacher, tmp_path / "teacher"))
    other = make_tokenizer()
    other.chat_template = "{{ messages }}"
    other.save_pretrained(teacher)
    new = tmp_path / "new"
    changes: dict[str, Any] = {
        "opd__data": str(new),
        "opd__teacher": {"url": world.teacher_url, "tokenizer": str(teacher)},
        "opd__prepare": {"num_prompts": 2},
    }
    with pytest.raises(ConfigError, match="chat template is not the student's"):
        prepare_now(world, config_of(world, **changes))
    manifest = prepare_now(world, config_of(world, **changes, opd__allow_mismatch=["template"]))
    assert manifest.settings.allowed == ("template",)
    with pytest.raises(ConfigError, match="difference that was allowed then: template"):
        open_answers(world, new)
    source = open_answers(world, new, opd__allow_mismatch=["template"])
    assert source.recording.allowed == ("template",)


def test_what_is_allowed_of_a_live_teacher_shows_in_the_metrics(world: World) -> None:
    live = config_of(world, opd__mode="live")
    assert mismatch_metrics(live, None, ["tokenizer"]) == {
        "opd/mismatch_allowed": 1.0,
        "opd/mismatch_allowed/tokenizer": 1.0,
    }
    assert mismatch_metrics(live, None) == {"opd/mismatch_allowed": 0.0}
    off = config_of(world, opd__mode="off", rollout__source="generate")
    assert mismatch_metrics(off, None) == {}


def test_rows_that_name_no_known_teacher_are_refused_before_an_answer_is_drawn(
    world: World, tmp_path: Path
) -> None:
    rows = [{"prompt": "31425"}, {"prompt": "42", "metadata": {"teacher": "nobody"}}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sources = {"path": str(data), "label_key": None}
    changes: dict[str, Any] = {"opd__data": str(tmp_path / "new"), "data": sources}
    with pytest.raises(DataError, match="no teacher for rows") as error:
        prepare_now(world, config_of(world, **changes))
    assert error.value.found == f"1 rows: {data}:2 ('nobody')"
    assert not (tmp_path / "new").exists()
    live = config_of(world, **changes, opd__mode="live", run__dir=str(tmp_path / "run"))
    with pytest.raises(DataError, match="no teacher for rows"):
        read_and_check(live, tmp_path)


def test_rows_of_a_table_that_name_no_teacher_have_the_one_without_a_name(
    world: World, tmp_path: Path
) -> None:
    """In a table every row has every column: the teacher's is null there."""
    rows = [{"prompt": "31425", "metadata": {"teacher": name}} for name in (None, "other")]
    data = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    changes: dict[str, Any] = {
        "opd__data": str(tmp_path / "new"),
        "opd__teachers": {"other": {"url": world.student_url}},
        "opd__allow_mismatch": ["teacher"],
        "data": {"path": str(data), "label_key": None},
    }
    prepare_now(world, config_of(world, **changes))
    source = open_answers(world, tmp_path / "new", opd__allow_mismatch=["teacher"])
    first, second = (place.read() for place in source.recording.places[::2])
    assert (first.teacher, second.teacher) == ("", "other")
    assert np.abs(second.teacher_log_probs - second.student_log_probs).max() < 1e-4
    assert np.abs(first.teacher_log_probs - first.student_log_probs).max() > 1e-2


def test_a_teacher_that_is_no_name_is_refused(world: World, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "31", "metadata": {"teacher": ["a"]}}) + "\n")
    sources = {"path": str(data), "label_key": None}
    config = config_of(world, opd__data=str(tmp_path / "new"), data=sources)
    with pytest.raises(DataError, match="no teacher for rows"):
        prepare_now(world, config)


@pytest.mark.parametrize("name", ["generate", "rollout", "data_source"])
def test_functions_of_the_users_that_would_be_left_out_are_refused(
    world: World, tmp_path: Path, name: str
) -> None:
    changes: dict[str, Any] = {
        "opd__mode": "off",
        "opd__data": str(tmp_path / "new"),
        "rollout__source": "generate",
        "rollout__hooks": {name: "mine:function"},
    }
    with pytest.raises(ConfigError, match="cannot be prepared") as error:
        prepare_now(world, config_of(world, **changes))
    assert error.value.where == f"rollout.hooks.{name}"


# -- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"trainer__algorithm__old_log_probs": "rollout"}, "old_log_probs: expected recompute"),
        ({"trainer__algorithm__advantage": "grpo"}, "advantage: expected none"),
        ({"trainer__algorithm__loss": "ppo_clip"}, "loss: expected policy_gradient"),
        ({"trainer__algorithm__loss": "sft"}, "sft has no advantages"),
        (
            {"trainer__algorithm__importance_correction": "mask"},
            "importance_correction: expected none",
        ),
        ({"rollout__source": "generate"}, "rollout.source: expected replay"),
        ({"data__sft": {}}, "data.sft: expected null with opd.mode: offline"),
        ({"rollout__filters": {"dynamic": "nonzero_std"}}, "filters.dynamic: expected null"),
        ({"rollout__filters": {"min_mean_reward": 0.5}}, "filters.min_mean_reward: expected null"),
        (
            {"opd__mode": "live", "rollout__source": "replay"},
            "rollout.source: expected generate with opd.mode: live",
        ),
        ({"opd__data": None}, "data: expected the folder"),
        ({"opd__mode": "live", "opd__teacher": None}, "expected a teacher's path or url"),
        ({"opd__mode": "live", "opd__importance": "truncate"}, "importance: expected none"),
        ({"opd__teacher": {"url": "http://a", "path": "b"}}, "exactly one of `path` and `url`"),
        ({"opd__teachers": {"": {"url": "http://a"}}}, "a name is empty"),
    ],
)
def test_settings_that_contradict_distillation_are_refused(
    world: World, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(world, **changes)


def test_offline_is_a_replay_without_saying_so(world: World) -> None:
    config: Config = config_of(world)
    assert config.rollout.is_replay
    assert not config.needs_engines


def test_the_old_place_of_the_term_is_unknown(world: World) -> None:
    with pytest.raises(ConfigError, match="opd_coef"):
        parse_config(
            {
                "model": {"path": "x"},
                "data": {"path": "y"},
                "trainer": {"algorithm": {"opd_coef": 1.0}},
            },
            where="the test",
        )
