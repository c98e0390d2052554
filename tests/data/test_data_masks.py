"""Exactly what the assistant wrote is under loss, whatever the template; or the row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masks_testkit import (
    byte_level_tokenizer,
    is_known,
    learned_texts,
    sentence_piece_tokenizer,
    sft_config,
    whole_text,
)

from rollmill.data.demonstrations import Demonstration, DemonstrationSet, load_demonstrations
from rollmill.errors import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 2?"}
FIRST = {"role": "assistant", "content": "It is four."}
AGAIN = {"role": "user", "content": "And Zürich?"}
SECOND = {"role": "assistant", "content": "\nA city, of course:  “Zürich” 🏔"}
TALK = [USER, FIRST, AGAIN, SECOND]

END = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "qwen25": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "deepseek": "<｜end▁of▁sentence｜>",
}
BEGINS = {"mistral": " "}
"""What the template puts between the generation prompt and the answer: the model writes it."""
TRIMS = {"llama3", "gemma"}
WITH_SYSTEM = ("chatml", "llama3", "qwen25", "deepseek")


def load(
    folder: Path, tokenizer: Any, *rows: dict[str, Any], limit: int | None = None, **fields: Any
) -> DemonstrationSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = sft_config(**({"path": str(path)} | fields))
    return load_demonstrations(config, tokenizer=tokenizer, context_length=limit)


def one(folder: Path, tokenizer: Any, messages: list[Any], **fields: Any) -> Demonstration:
    (row,) = load(folder, tokenizer, {"messages": messages}, **fields).rows
    return row


def written(template: str, *messages: dict[str, Any]) -> list[str]:
    """What the model has to write for these turns."""
    texts = [m["content"].strip() if template in TRIMS else m["content"] for m in messages]
    return [BEGINS.get(template, "") + text + END[template] for text in texts]


@pytest.mark.parametrize("template", sorted(set(END) - {"qwen3"}))
def test_every_assistant_turn_and_its_end_is_learned_and_nothing_else(
    template: str, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer(template)
    row = one(tmp_path, tokenizer, TALK)
    assert learned_texts(row, tokenizer) == written(template, FIRST, SECOND)
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False)
    end = rendered.rindex(END[template]) + len(END[template])
    assert whole_text(row, tokenizer) == rendered[:end]


@pytest.mark.parametrize("template", sorted(set(END) - {"qwen3"}))
def test_the_prompt_ends_where_the_model_takes_over(template: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(template)
    row = one(tmp_path, tokenizer, TALK)
    asked = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert row.prompt_tokens.tolist() == tokenizer.encode(asked, add_special_tokens=False)


@pytest.mark.parametrize("template", WITH_SYSTEM)
def test_a_system_message_is_never_learned(template: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(template)
    row = one(tmp_path, tokenizer, TALK, system_prompt="Be brief.")
    assert learned_texts(row, tokenizer) == written(template, FIRST, SECOND)
    assert "Be brief." in tokenizer.decode(row.prompt_tokens.tolist())


def test_a_template_that_removes_thinking_is_refused_with_the_turn_and_the_difference(
    tmp_path: Path,
) -> None:
    thoughtful = {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\nFour."}
    with pytest.raises(DataError) as caught:
        load(
            tmp_path, byte_level_tokenizer("qwen3"), {"messages": [USER, thoughtful, AGAIN, FIRST]}
        )
    text = str(caught.value)
    assert "rows.jsonl:1" in text
    assert "message 2 (assistant): the template changes the text" in text
    before, after = text.split(" became ")
    assert r"<think>\n2 and 2\n</think>\n\nFour." in before
    assert r"assistant\nFour.<|im_end|>" in after
    assert "data.sft.turns: each" in after


def test_with_one_sample_per_turn_a_thinking_template_is_learned_as_it_answers(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level_tokenizer("qwen3")
    thoughtful = {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\nFour."}
    later = {"role": "assistant", "content": "<think>\nthere\n</think>\n\nA city."}
    talk = {"messages": [USER, thoughtful, AGAIN, later]}
    first, second = load(tmp_path, tokenizer, talk, sft={"turns": "each"}).rows
    assert learned_texts(first, tokenizer) == ["<think>\n2 and 2\n</think>\n\nFour.<|im_end|>"]
    assert learned_texts(second, tokenizer) == ["<think>\nthere\n</think>\n\nA city.<|im_end|>"]
    prompt = tokenizer.decode(second.prompt_tokens.tolist())
    assert "2 and 2" not in prompt
    assert "Four." in prompt
    (last,) = load(tmp_path, tokenizer, talk, sft={"turns": "last"}).rows
    assert whole_text(last, tokenizer) == whole_text(second, tokenizer)


def test_a_template_whose_generation_prompt_thinks_and_whose_answers_do_not_is_refused(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level_tokenizer("deepseek_r1")
    for turns in ("all", "last"):
        with pytest.raises(DataError, match=r"the generation prompt of message \d \(assistant\)"):
            load(tmp_path, tokenizer, {"messages": TALK}, sft={"turns": turns})
    with pytest.raises(DataError, match="does not write answers as it asks for them"):
        load(tmp_path, tokenizer, {"messages": TALK}, sft={"turns": "last"})


def test_a_setting_of_the_template_changes_the_prompt_and_what_is_learned_alike(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level_tokenizer("qwen3")
    quick = {"chat_template_kwargs": {"enable_thinking": False}, "sft": {"turns": "each"}}
    rows = load(tmp_path, tokenizer, {"messages": TALK}, **quick).rows
    assert [learned_texts(row, tokenizer) for row in rows] == [
        ["It is four.<|im_end|>"],
        [SECOND["content"].lstrip() + "<|im_end|>"],
    ]
    assert tokenizer.decode(rows[0].prompt_tokens.tolist()).endswith("<think>\n\n</think>\n\n")


def test_a_template_without_a_generation_prompt_is_refused_where_it_hides_a_header(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=r"learn to write the header"):
        load(tmp_path, byte_level_tokenizer("headless"), {"messages": TALK})


def test_a_template_without_ends_of_turns_gets_the_end_of_sequence_behind_the_last_turn_only(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level_tokenizer("vicuna")
    row = one(tmp_path, tokenizer, [USER, FIRST])
    assert learned_texts(row, tokenizer) == [" It is four." + tokenizer.eos_token]
    spaced = {"role": "assistant", "content": "It is four.\n\n"}
    row = one(tmp_path, tokenizer, [USER, spaced])
    assert learned_texts(row, tokenizer) == [" It is four.\n\n" + tokenizer.eos_token]
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template writes no end"):
        load(tmp_path, tokenizer, {"messages": TALK})
    rows = load(tmp_path, tokenizer, {"messages": TALK}, sft={"turns": "each"}).rows
    assert [row.answer_tokens[-1] for row in rows] == [tokenizer.eos_token_id] * 2


@pytest.mark.parametrize("template", ["llama3", "qwen25"])
def test_tool_calls_are_learned_and_tool_results_are_not(template: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(template)
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
        ],
    }
    result = {"role": "tool", "content": "4", "name": "add"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = load(tmp_path, tokenizer, {"messages": [USER, call, result, FIRST], "tools": tools}).rows[
        0
    ]
    called, answered = learned_texts(row, tokenizer)
    assert '"name": "add"' in called
    assert '{"a": 2, "b": 2}' in called
    assert called.endswith(END[template])
    assert answered == "It is four." + END[template]
    prompt = tokenizer.decode(row.prompt_tokens.tolist())
    assert '"parameters": {}' in prompt
    assert prompt.endswith(("assistant\n", "assistant", "<|end_header_id|>\n\n"))


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}


@pytest.mark.parametrize(
    ("template", "message", "part"),
    [
        ("chatml", CALL, "tool_calls"),
        ("llama3", {**CALL, "content": "Let me see."}, "content"),
        ("chatml", {**FIRST, "reasoning_content": "2 and 2"}, "reasoning_content"),
        ("headless", {**FIRST, "thinking": "2 and 2"}, "thinking"),
        ("deepseek", {**FIRST, "reasoning": "2 and 2"}, "reasoning"),
    ],
)
def test_what_the_template_does_not_know_is_refused_and_not_left_out(
    template: str, message: dict[str, Any], part: str, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer(template)
    with pytest.raises(DataError) as caught:
        load(tmp_path, tokenizer, {"messages": [USER, message]})
    assert f"message 2 (assistant): the template leaves out its {part}" in str(caught.value)


def test_a_template_that_reads_content_as_parts_is_refused_with_texts(tmp_path: Path) -> None:
    """It goes through the letters of a text and writes none of them."""
    tokenizer = byte_level_tokenizer("parts")
    with pytest.raises(DataError, match="the template leaves out its content"):
        load(tmp_path, tokenizer, {"messages": [USER, FIRST]})
    talk = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in (USER, FIRST)]
    row = one(tmp_path, tokenizer, talk)
    assert learned_texts(row, tokenizer) == ["It is four.<|im_end|>"]


def test_an_answer_of_nothing_is_refused_unless_it_is_out_of_the_loss(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("chatml")
    nothing = {"role": "assistant", "content": " "}
    with pytest.raises(
        DataError, match=r"message 2 \(assistant\): it has no text and no tool call"
    ):
        load(tmp_path, tokenizer, {"messages": [USER, nothing, AGAIN, SECOND]})
    row = one(tmp_path, tokenizer, [USER, {**nothing, "step_loss_mask": 0}, AGAIN, SECOND])
    assert learned_texts(row, tokenizer) == written("chatml", SECOND)


def test_thinking_that_the_generation_prompt_begins_is_learned_from_there(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("opens_thinking")
    for thoughtful in (
        {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\nFour."},
        {"role": "assistant", "content": "Four.", "reasoning_content": "2 and 2"},
    ):
        row = one(tmp_path, tokenizer, [USER, thoughtful])
        assert learned_texts(row, tokenizer) == ["2 and 2\n</think>\n\nFour.<|im_end|>"]
        assert tokenizer.decode(row.prompt_tokens.tolist()).endswith("<think>\n")


@pytest.mark.parametrize("turns", ["all", "each"])
def test_an_end_of_sequence_behind_the_whole_conversation_ends_no_turn(
    turns: str, tmp_path: Path
) -> None:
    """Phi-3's template puts one there; when the next answer is asked for, it is gone."""
    tokenizer = byte_level_tokenizer("phi3")
    rows = load(tmp_path, tokenizer, {"messages": TALK}, sft={"turns": turns}).rows
    learned = [text for row in rows for text in learned_texts(row, tokenizer)]
    assert learned == ["It is four.<|im_end|>", SECOND["content"] + "<|im_end|>"]


def test_several_tokens_that_end_every_turn_are_all_learned(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("two_ends")
    row = one(tmp_path, tokenizer, TALK)
    assert learned_texts(row, tokenizer) == [
        message["content"] + "<|im_end|><|eot_id|>" for message in (FIRST, SECOND)
    ]


def test_a_message_can_be_taken_out_of_the_loss(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("chatml")
    row = one(tmp_path, tokenizer, [USER, {**FIRST, "step_loss_mask": 0}, AGAIN, SECOND])
    assert learned_texts(row, tokenizer) == written("chatml", SECOND)
    assert "It is four." in tokenizer.decode(row.prompt_tokens.tolist())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([FIRST, USER], "cannot begin with the assistant"),
        ([USER], "no turn to learn: its messages are user"),
        ([USER, {**FIRST, "step_loss_mask": 2}], "message 2: step_loss_mask must be 0 or 1"),
        ([{**USER, "step_loss_mask": 1}, FIRST], "only the assistant's turns"),
        ([], "must be a list of messages"),
        ([USER, {"role": "assistant"}], "message 2"),
    ],
)
def test_a_row_that_cannot_be_learned_stops_with_its_place_and_reason(
    messages: list[Any], reason: str, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer("chatml")
    with pytest.raises(DataError, match="a row of the data cannot be used") as caught:
        load(tmp_path, tokenizer, {"messages": TALK}, {"messages": messages})
    assert "rows.jsonl:2" in str(caught.value)
    assert reason in str(caught.value)
    kept = load(tmp_path, tokenizer, {"messages": TALK}, {"messages": messages}, bad_rows="skip")
    assert (len(kept.rows), kept.num_bad) == (1, 1)


def test_images_are_refused_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="images"):
        load(tmp_path, byte_level_tokenizer("chatml"), {"messages": TALK, "images": ["a.png"]})


def test_long_conversations_stop_are_left_out_or_cut_and_always_counted(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("chatml")
    short, long = {"messages": [USER, FIRST]}, {"messages": TALK}
    length = len(one(tmp_path, tokenizer, TALK).answer_tokens)
    limit = len(load(tmp_path, tokenizer, short).rows[0].prompt_tokens) + length - 3
    with pytest.raises(DataError, match=rf"at most {limit} tokens"):
        load(tmp_path, tokenizer, short, long, limit=limit)
    skipped = load(tmp_path, tokenizer, short, long, limit=limit, sft={"too_long": "skip"})
    assert (len(skipped.rows), skipped.num_too_long, skipped.num_truncated) == (1, 1, 0)
    cut = load(tmp_path, tokenizer, short, long, limit=limit, sft={"too_long": "truncate"})
    assert (len(cut.rows), cut.num_too_long, cut.num_truncated) == (2, 0, 1)
    assert [row.is_truncated for row in cut.rows] == [False, True]
    assert len(cut.rows[1].prompt_tokens) + len(cut.rows[1].answer_tokens) == limit
    beyond = load(tmp_path, tokenizer, short, long, sft={"too_long": "truncate", "max_tokens": 40})
    assert all(len(row.prompt_tokens) + len(row.answer_tokens) <= 40 for row in beyond.rows)


def test_a_cut_that_leaves_nothing_to_learn_leaves_the_row_out(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("chatml")
    wordy = {"messages": [{"role": "user", "content": "word " * 50}, FIRST]}
    kept = load(
        tmp_path, tokenizer, {"messages": [USER, FIRST]}, wordy, limit=45,
        sft={"too_long": "truncate"},
    )  # fmt: skip
    assert (len(kept.rows), kept.num_too_long, kept.num_truncated) == (1, 1, 0)


def test_responses_to_prompts_are_learned_like_the_last_turn(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("chatml")
    sft = {"response_key": "answer"}
    row = {"prompt": USER["content"], "answer": FIRST["content"]}
    (text,) = load(tmp_path, tokenizer, row, sft=sft).rows
    assert learned_texts(text, tokenizer) == written("chatml", FIRST)
    row = {"prompt": [USER, FIRST, AGAIN], "answer": SECOND["content"]}
    (chat,) = load(tmp_path, tokenizer, row, sft=sft).rows
    assert learned_texts(chat, tokenizer) == written("chatml", SECOND)


def test_plain_text_is_tokenized_as_a_prompt_and_an_answer_that_ends(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("chatml")
    row = {"prompt": "2 + 2 =", "answer": " 4"}
    (row_,) = load(
        tmp_path, tokenizer, row, sft={"response_key": "answer"}, apply_chat_template=False
    ).rows
    assert row_.prompt_tokens.tolist() == tokenizer("2 + 2 =")["input_ids"]
    assert learned_texts(row_, tokenizer) == [" 4" + tokenizer.eos_token]


def test_a_tokenizer_that_puts_spaces_before_texts_is_cut_between_its_own_tokens(
    tmp_path: Path,
) -> None:
    tokenizer = sentence_piece_tokenizer("mistral")
    polite = {"role": "assistant", "content": "It is four, of course."}
    row = one(tmp_path, tokenizer, [USER, polite, {**USER, "content": "Hello again."}, FIRST])
    rendered = (
        "<s>[INST] What is 2 + 2? [/INST] It is four, of course.</s>"
        "[INST] Hello again. [/INST] It is four.</s>"
    )
    ids = [*row.prompt_tokens.tolist(), *row.answer_tokens.tolist()]
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)
    learned = [s.token_ids.tolist() for s in row.segments if s.trainable]
    assert [ids[-1] for ids in learned] == [tokenizer.eos_token_id] * 2
    assert [tokenizer.decode(ids).strip() for ids in learned] == [
        "It is four, of course.</s>", "It is four.</s>",
    ]  # fmt: skip


def test_a_token_that_straddles_the_border_is_refused_with_the_place(tmp_path: Path) -> None:
    tokenizer = sentence_piece_tokenizer("mistral")
    assert len(tokenizer.encode("four", add_special_tokens=False)) == 1
    row = {"prompt": "It is fo", "answer": "ur, of course."}
    with pytest.raises(DataError, match="a token straddles the border between prompt and answer"):
        load(tmp_path, tokenizer, row, sft={"response_key": "answer"}, apply_chat_template=False)


CONTENT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")) | st.sampled_from("\n \t"),
    min_size=1,
    max_size=20,
).filter(lambda text: text.strip() and "<" not in text and is_known(text))


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(CONTENT, min_size=2, max_size=8),
    template=st.sampled_from(["chatml", "qwen25", "deepseek", "mistral"]),
)
def test_whatever_is_said_the_mask_decodes_to_the_assistants_words(
    contents: list[str], template: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = byte_level_tokenizer(template)
    contents = contents[: len(contents) // 2 * 2]
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    row = one(tmp_path_factory.mktemp("rows"), tokenizer, messages)
    expected = written(template, *messages[1::2])
    assert learned_texts(row, tokenizer) == expected
    assert int(np.sum(row.mask)) == sum(len(s) for s in row.segments if s.trainable)
