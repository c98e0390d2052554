"""Recorded answers as groups: endless, exact over epochs, finished, and resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from masks_testkit import byte_level_tokenizer, sentence_piece_tokenizer, sft_config

from rollmill.data.demonstrations import load_demonstrations
from rollmill.data.marked_tokens import MarkedTokenizer
from rollmill.data.masks import MarkedText
from rollmill.data.readers import BadRowError
from rollmill.data.recorded import DemonstrationSource
from rollmill.sample import Status
from rollmill.sample_codec import decode_group, encode_group


def source(folder: Path, *answers: str, limit: int | None = None, **turn: Any) -> Any:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "first", **turn},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": answer},
            ],
            "metadata": {"row": number},
        }
        for number, answer in enumerate(answers)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = byte_level_tokenizer("chatml")
    config = sft_config(path=str(path), sft={"too_long": "truncate"})
    rows_ = load_demonstrations(config, tokenizer=tokenizer, context_length=limit)
    return DemonstrationSource(rows_, tokenizer, seed=1)


def test_every_epoch_holds_every_row_once_and_take_is_exact(tmp_path: Path) -> None:
    answers = source(tmp_path, "a", "b", "c")
    groups = [group for n in (2, 5, 1, 1) for group in answers.take(n)]
    assert [group.group_index for group in groups] == list(range(9))
    rows = [group.samples[0].metadata["row"] for group in groups]
    assert [sorted(rows[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert len({group.samples[0].index for group in groups}) == 9


def test_a_group_comes_finished_and_survives_the_wire(tmp_path: Path) -> None:
    (group,) = source(tmp_path, "a").take(1)
    sample = group.samples[0]
    assert sample.status is Status.COMPLETED
    assert [s.trainable for s in sample.segments] == [True, False, True]
    assert [s.source for s in sample.segments] == ["data", "environment", "data"]
    assert sample.prompt.endswith("<|im_start|>assistant\n")
    assert sample.response.startswith("first<|im_end|>\n<|im_start|>user")
    assert decode_group(encode_group(group)).samples == group.samples


def test_a_cut_answer_is_truncated(tmp_path: Path) -> None:
    (group,) = source(tmp_path, "word " * 50, limit=60).take(1)
    assert group.samples[0].status is Status.TRUNCATED
    assert len(group.samples[0].tokens) == 60


def test_a_saved_position_goes_on_and_another_mask_is_another_data_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = source(tmp_path, "a", "b", "c")
    first.take(2)
    saved = json.loads(json.dumps(first.state_dict()))
    expected = [group.samples[0].response for group in first.take(4)]
    same = source(tmp_path, "a", "b", "c")
    same.load_state_dict(saved)
    assert [group.samples[0].response for group in same.take(4)] == expected
    assert not caplog.records
    masked = source(tmp_path, "a", "b", "c", step_loss_mask=0)
    masked.load_state_dict(saved)
    assert "the data set changed" in caplog.text


def test_a_border_inside_a_token_is_refused_where_text_cannot_be_cut() -> None:
    tokenizer = MarkedTokenizer(sentence_piece_tokenizer("mistral"), adds_special=False)
    inside, between = tokenizer.tokens(
        [
            MarkedText("Hello again.", ((3, 12),), False),
            MarkedText("Hello again.", ((5, 12),), False),
        ]
    )
    assert isinstance(inside, BadRowError)
    assert "straddles the border between prompt and answer, at 'Hel' and 'lo again.'" in str(inside)
    assert not isinstance(between, BadRowError)
    assert between.mask.sum() < len(between.tokens)


def test_the_samples_of_one_row_have_names_of_their_own(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    names = {
        way: [
            one.row_id
            for one in load_demonstrations(
                sft_config(path=str(path), sft={"turns": way}),
                tokenizer=byte_level_tokenizer("chatml"),
            ).rows
        ]
        for way in ("all", "last", "each")
    }
    assert names["all"] == names["last"] == [f"{path}:1"]
    assert names["each"] == [f"{path}:1 (turn 1 of 2)", f"{path}:1 (turn 2 of 2)"]
