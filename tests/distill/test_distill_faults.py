"""Faults of earlier implementations of offline distillation, each shown to be absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distill_helpers import ANSWERS, NUM_PROMPTS, World, open_answers

from rollmill.data import load_tokenizer
from rollmill.errors import ConfigError, DataError
from rollmill.sample import Sample, Status
from support.tiny import EOS, MAX_NEW_TOKENS, VOCABULARY

ALL = ["teacher", "student", "tokenizer", "template", "sampling"]
END = VOCABULARY.index(EOS)


def rows_of(world: World, folder: Path) -> list[Any]:
    return [place.read() for place in open_answers(world, folder).recording.places]


# -- what prepare records ------------------------------------------------------------------------


def test_the_end_of_sequence_is_recorded(world: World, prepared: Path) -> None:
    rows = rows_of(world, prepared)
    finished = [row for row in rows if row.finish_reason == "stop"]
    assert finished
    assert all(row.response_tokens[-1] == END for row in finished)


def test_truncated_answers_stay_truncated(world: World, prepared: Path) -> None:
    source = open_answers(world, prepared)
    samples = [sample for group in source.take(len(source)) for sample in group.samples]
    cut = [sample for sample in samples if sample.status is Status.TRUNCATED]
    assert cut
    assert all(s.response_length == MAX_NEW_TOKENS and s.response_tokens[-1] != END for s in cut)
    assert {sample.status for sample in samples} == {Status.TRUNCATED, Status.COMPLETED}


def test_prompts_are_the_tokens_that_training_prompts_have(world: World, prepared: Path) -> None:
    tokenizer = load_tokenizer(world.student)
    for row in rows_of(world, prepared):
        messages = [{"role": "user", "content": row.prompt}]
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert row.prompt_tokens.tolist() == expected


def test_answers_to_one_prompt_are_different_draws(world: World, prepared: Path) -> None:
    source = open_answers(world, prepared)
    groups = source.take(NUM_PROMPTS)
    assert all(len(group.samples) == ANSWERS for group in groups)
    answers = [[tuple(s.response_tokens.tolist()) for s in g.samples] for g in groups]
    assert sum(first != second for first, second in answers) > NUM_PROMPTS / 4


# -- the released layout -------------------------------------------------------------------------


def released(**changes: Any) -> dict[str, Any]:
    """A row of the released layout; `None` leaves a field null."""
    metadata: dict[str, Any] = {
        "is_lightning_opd": True,
        "response_tokens": [5, 6, 7, END],
        "loss_mask": [1, 1, 1, 1],
        "teacher_log_probs": [-0.5, -0.25, -1.0, -2.0],
        "student_log_probs": [-0.75, -0.5, -1.5, -3.0],
        "response": "234",
    }
    return {"prompt": "52341>", "label": "0", "metadata": {**metadata, **changes}}


def write_released(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def open_released(world: World, path: Path) -> list[Sample]:
    source = open_answers(
        world, path, opd__allow_mismatch=ALL, rollout__n_samples_per_prompt=1, data__shuffle=False
    )
    return [sample for group in source.take(len(source)) for sample in group.samples]


def test_the_released_layout_is_read(world: World, tmp_path: Path) -> None:
    path = write_released(tmp_path / "a.parquet", [released(), released(response_tokens=[5] * 4)])
    samples = open_released(world, path)
    assert samples[0].prompt_tokens.tolist() == [VOCABULARY.index(c) for c in "52341>"]
    assert samples[0].response_tokens.tolist() == [5, 6, 7, END]
    assert samples[0].teacher_log_probs is not None
    assert samples[0].teacher_log_probs.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert samples[0].rollout_log_probs.tolist() == [-0.75, -0.5, -1.5, -3.0]
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.TRUNCATED]


@pytest.mark.parametrize("kind", ALL)
def test_the_released_layout_proves_nothing_about_its_models(
    world: World, tmp_path: Path, kind: str
) -> None:
    path = write_released(tmp_path / "a.parquet", [released()])
    allowed = [other for other in ALL if other != kind]
    with pytest.raises(ConfigError, match="the file does not say"):
        open_answers(world, path, opd__allow_mismatch=allowed, rollout__n_samples_per_prompt=1)


def test_the_response_length_is_that_of_the_tokens_whatever_the_mask(
    world: World, tmp_path: Path
) -> None:
    path = write_released(tmp_path / "a.parquet", [released(loss_mask=[1, 0, 0, 1])])
    (sample,) = open_released(world, path)
    assert sample.response_length == 4
    assert sample.loss_mask.tolist() == [True, False, False, True]
    assert sample.teacher_log_probs is not None
    assert len(sample.teacher_log_probs) == 4


BAD_RELEASED: dict[str, tuple[dict[str, Any], str]] = {
    "a null": ({"teacher_log_probs": None}, "no value for metadata.teacher_log_probs"),
    "no student": ({"student_log_probs": None}, "no value for metadata.student_log_probs"),
    "one for all": ({"teacher_log_probs": [-0.5]}, "teacher_log_probs: expected 4"),
    "none at all": ({"teacher_log_probs": []}, "teacher_log_probs: expected 4"),
    "a short mask": ({"loss_mask": [1, 1, 1]}, "loss_mask: expected 4"),
    "a mask of weights": ({"loss_mask": [1, 1, 2, 1]}, "loss_mask: expected 0 or 1, found 2"),
    "an empty mask": ({"loss_mask": [0, 0, 0, 0]}, "loss_mask: expected at least one 1"),
    "no flag": ({"is_lightning_opd": None}, "is_lightning_opd: expected true, found None"),
    "positive": ({"teacher_log_probs": [0.1, -1.0, -1.0, -1.0]}, "none above 0"),
    "no list": ({"response_tokens": 5}, "metadata.response_tokens: expected a list, found 5"),
    "half an id": ({"response_tokens": [5.0, 6.5, 7.0, 1.0]}, "found 5.0 at position 0"),
    "a null id": ({"response_tokens": [5, None, 7, END]}, "found None at position 1"),
    "words": ({"teacher_log_probs": ["a", "b", "c", "d"]}, "found nan at position 0"),
    "a foreign id": ({"response_tokens": [5, 6, 7, 4800]}, "expected ids from 0 to 47"),
}


@pytest.mark.parametrize("name", BAD_RELEASED)
def test_every_released_row_is_checked_not_the_first_alone(
    world: World, tmp_path: Path, name: str
) -> None:
    changes, text = BAD_RELEASED[name]
    is_typed_otherwise = name in ("no list", "half an id", "words")  # a column has one type
    others = [released(), released()] if not is_typed_otherwise else [released(**changes)] * 2
    rows = [others[0], released(**changes), others[1]]
    path = write_released(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError) as error:
        open_released(world, path)
    named = next(line for line in str(error.value).splitlines() if "a.parquet:1: " in line)
    assert text in named
    assert ("a.parquet:0" in str(error.value)) is is_typed_otherwise


def test_answers_without_tokens_are_samples_without_loss(world: World, tmp_path: Path) -> None:
    empty = {name: [] for name in ("response_tokens", "loss_mask")}
    empty |= {name: [] for name in ("teacher_log_probs", "student_log_probs")}
    path = write_released(tmp_path / "a.parquet", [released(), released(**empty)])
    first, second = open_released(world, path)
    assert (first.response_length, second.response_length) == (4, 0)
    assert second.status is Status.TRUNCATED
    assert second.teacher_log_probs is not None
    assert len(second.teacher_log_probs) == 0
    assert len(second.segments) == 1  # a finished answer, of no tokens
