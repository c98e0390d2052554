"""Reading and checking data sets: what is used, what is refused, what is counted."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import make_tokenizer

from rollmill.config import DatasetConfig
from rollmill.data import load_dataset, load_rows
from rollmill.data.paths import find_entry
from rollmill.data.readers import read_rows
from rollmill.errors import DataError

SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}default+{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'system' %}:{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def row(prompt="12", label="21", **more):
    return {"prompt": prompt, "label": label, **more}


def rows_of(tokenizer, path, **options):
    return load_rows(DatasetConfig(path=path, **options), tokenizer=tokenizer)


def refused(tokenizer, path, **options) -> DataError:
    with pytest.raises(DataError) as caught:
        rows_of(tokenizer, path, **options)
    return caught.value


# --- rows and fields ------------------------------------------------------------------------


def test_rows_come_in_data_set_order_with_their_place(tokenizer, write_jsonl):
    path = write_jsonl(row("1", "a", metadata={"k": [1]}), "", row("2", "b"))
    first, second = rows_of(tokenizer, path)
    assert (first.prompt, first.label, first.metadata) == ("1", "a", {"k": [1]})
    assert (first.row_id, second.row_id) == (f"{path}:1", f"{path}:3")
    assert tokenizer.decode(first.prompt_tokens) == "1>"
    assert first.prompt_tokens.dtype == "int32"
    assert second.metadata == {}


def test_keys_of_the_configuration_name_the_fields(tokenizer, write_jsonl):
    path = write_jsonl({"question": "1", "gold": 5, "info": {"a": 1}})
    (only,) = rows_of(tokenizer, path, prompt_key="question", label_key="gold", metadata_key="info")
    assert (only.prompt, only.label, only.metadata) == ("1", 5, {"a": 1})


def test_integers_of_any_size_stay_exact(tokenizer, write_jsonl):
    (only,) = rows_of(tokenizer, write_jsonl(row(label=10**40 + 1)))
    assert only.label == 10**40 + 1


@pytest.mark.parametrize("metadata", [{"a": 1}, '{"a": 1}'])
def test_metadata_may_be_an_object_or_one_as_json_text(tokenizer, write_jsonl, metadata):
    (only,) = rows_of(tokenizer, write_jsonl(row(metadata=metadata)))
    assert only.metadata == {"a": 1}


@pytest.mark.parametrize("metadata", [None, ""])
def test_absent_metadata_is_empty(tokenizer, write_jsonl, metadata):
    (only,) = rows_of(tokenizer, write_jsonl(row(metadata=metadata)))
    assert only.metadata == {}


def test_rows_with_and_without_images_mix(tokenizer, write_jsonl):
    path = write_jsonl(row(images=["a.png", "b.png"]), row(images=[]), row(images="c.png"), row())
    images = [r.images for r in rows_of(tokenizer, path)]
    assert images == [("a.png", "b.png"), (), ("c.png",), ()]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "expected a JSON object, found an array"),
        ("null", "expected a JSON object, found null"),
        ('{"prompt": "1", "label": NaN}', "NaN is not a JSON number"),
        ('{"prompt": "1\\ud800", "label": 1}', "lone surrogate (U+D800)"),
        ('{"prompt": "1", "label": "\\udfff"}', "lone surrogate (U+DFFF)"),
        ({"label": 1, "text": "1"}, "no field 'prompt' (data.prompt_key); the row's fields are"),
        ({"prompt": "1"}, "no field 'label'"),
        (row(prompt=" "), "the prompt is empty"),
        (row(prompt=None), "must be text or a list of messages"),
        (row(prompt=[]), "empty list of messages"),
        (row(prompt=[{"content": "1"}]), "message 1 is not an object with a role"),
        (row(prompt=[{"role": "user"}]), "message 1 (user) has no text content"),
        (row(prompt=[{"role": "assistant", "content": "1"}]), "the last message is the assistant"),
        (row(metadata=[1]), "metadata must be an object"),
        (row(metadata="{"), "metadata is text that is not JSON"),
        (row(tools="5"), "tools must be a list of tool schemas"),
    ],
)
def test_a_bad_row_stops_with_file_line_and_reason(tokenizer, write_jsonl, bad, reason):
    path = write_jsonl(row(), bad)
    error = refused(tokenizer, path)
    assert error.where == f"{path}:2"
    assert reason in error.found
    assert "bad_rows: skip" in error.fix


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"question": "1", "label": 1}, "set data.prompt_key to the field that holds it"),
        ({"prompt": "1", "answer": 1}, "data.label_key to the field that holds it, or to null"),
    ],
)
def test_rows_with_other_names_say_which_key_to_set(tokenizer, write_jsonl, given, fix):
    assert fix in refused(tokenizer, write_jsonl(given)).fix


def test_bytes_that_are_not_utf8_are_a_bad_row(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt":"1","label":1}\n{"prompt":"\xff"}\n')
    error = refused(tokenizer, str(tmp_path / "a.jsonl"))
    assert error.where.endswith("a.jsonl:2")
    assert "0xff" in error.found


def test_paired_surrogate_escapes_are_ordinary_text(tokenizer, write_jsonl):
    (only,) = rows_of(tokenizer, write_jsonl('{"prompt": "1", "label": "\\ud83d\\ude00"}'))
    assert only.label == "\N{GRINNING FACE}"


def test_skipped_rows_are_counted_and_logged(tokenizer, write_jsonl, caplog):
    path = write_jsonl("{", row("1"), row(prompt=""), row("2"))
    data = load_dataset(DatasetConfig(path=path, bad_rows="skip"), tokenizer=tokenizer)
    assert [r.prompt for r in data.rows] == ["1", "2"]
    assert data.num_bad == 2
    assert "left out 2 of 4 rows" in caplog.text
    assert f"{path}:1" in caplog.text


def test_only_bad_rows_is_an_error_even_when_skipping(tokenizer, write_jsonl):
    error = refused(tokenizer, write_jsonl("{", "{"), bad_rows="skip")
    assert "2 bad" in error.found
    assert "not JSON" in error.found


def test_labels_are_optional_only_when_the_config_says_so(tokenizer, write_jsonl):
    path = write_jsonl({"prompt": "1"})
    assert "or to null when there is none" in refused(tokenizer, path).fix
    (only,) = rows_of(tokenizer, path, label_key=None)
    assert only.label is None


def test_a_key_the_user_named_must_be_in_some_row(tokenizer, write_jsonl):
    path = write_jsonl(row(meta={"a": 1}), row())
    assert len(rows_of(tokenizer, path, metadata_key="meta")) == 2
    error = refused(tokenizer, path, metadata_key="mta")
    assert error.where == "data.metadata_key"
    assert "meta" in error.found


# --- empty, too long ------------------------------------------------------------------------


def test_an_empty_file_is_an_error(tokenizer, write_jsonl):
    assert "empty" in refused(tokenizer, write_jsonl()).what
    assert "empty" in refused(tokenizer, write_jsonl(row()) + "@[5:]").what


def test_too_long_prompts_are_left_out_and_counted(tokenizer, write_jsonl, caplog):
    path = write_jsonl(row("1"), row("1" * 9), row("2" * 4))
    data = load_dataset(DatasetConfig(path=path), tokenizer=tokenizer, context_length=6)
    assert [r.prompt for r in data.rows] == ["1", "2222"]
    assert (data.num_too_long, data.max_prompt_tokens) == (1, 5)
    assert "left out 1 of 3 prompts longer than 5 tokens (up to 10)" in caplog.text


def test_the_tighter_of_both_limits_counts(tokenizer, write_jsonl):
    config = DatasetConfig(path=write_jsonl(row("1"), row("22")), max_prompt_tokens=2)
    data = load_dataset(config, tokenizer=tokenizer, context_length=100)
    assert [r.prompt for r in data.rows] == ["1"]


def test_only_too_long_prompts_is_an_error_with_lengths_and_limit(tokenizer, write_jsonl):
    config = DatasetConfig(path=write_jsonl(row("1" * 7), row("1" * 9)))
    with pytest.raises(DataError) as caught:
        load_rows(config, tokenizer=tokenizer, context_length=5)
    assert "at most 4 tokens" in caught.value.expected
    assert "2 prompts of 8 to 10 tokens" in caught.value.found


# --- template -------------------------------------------------------------------------------


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer, path, **options):
    return [tokenizer.decode(r.prompt_tokens) for r in rows_of(tokenizer, path, **options)]


def test_an_empty_system_prompt_suppresses_the_default_message(write_jsonl):
    tokenizer, path = with_template(SYSTEM_TEMPLATE), write_jsonl(row("12"))
    assert rendered(tokenizer, path) == ["default+12>"]
    assert rendered(tokenizer, path, system_prompt="") == [":12>"]
    assert rendered(tokenizer, path, system_prompt="be brief") == ["be brief:12>"]


def test_a_system_message_in_the_row_wins(write_jsonl):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "12"}]
    path = write_jsonl(row(messages))
    assert rendered(with_template(SYSTEM_TEMPLATE), path, system_prompt="config") == ["own:12>"]


def test_tools_reach_the_template_as_objects_or_as_text(write_jsonl):
    tokenizer = with_template("{% for t in tools or [] %}{{ t['name'] }},{% endfor %}>")
    path = write_jsonl(
        row(tools=[{"name": "a"}, {"name": "b"}]), row(tools='[{"name": "c"}]'), row()
    )
    assert rendered(tokenizer, path) == ["a,b,>", "c,>", ">"]


def test_template_arguments_are_passed_on(write_jsonl):
    tokenizer = with_template("{{ 'think' if enable_thinking else 'plain' }}>")
    path = write_jsonl(row())
    assert rendered(tokenizer, path, chat_template_kwargs={"enable_thinking": True}) == ["think>"]


def test_what_a_template_refuses_is_a_bad_row(write_jsonl):
    tokenizer = with_template("{{ raise_exception('no system role') }}")
    error = refused(tokenizer, write_jsonl(row()))
    assert "no system role" in error.found


def test_a_tokenizer_without_template_is_an_error_that_says_what_to_set(write_jsonl):
    tokenizer, path = with_template(None), write_jsonl(row("12"))
    assert "apply_chat_template: false" in refused(tokenizer, path).fix
    assert rendered(tokenizer, path, apply_chat_template=False) == ["12"]


def test_messages_need_the_chat_template(tokenizer, write_jsonl):
    path = write_jsonl(row([{"role": "user", "content": "1"}]))
    assert "apply_chat_template" in refused(tokenizer, path, apply_chat_template=False).found


# --- files ----------------------------------------------------------------------------------


def test_parquet_rows_are_read_with_their_row_number(tokenizer, tmp_path):
    path = tmp_path / "rows.parquet"
    records = [row("1", metadata='{"a": 1}'), row(None), row("3")]
    pq.write_table(pa.Table.from_pylist(records), path)
    error = refused(tokenizer, str(path))
    assert error.where == f"{path}:row 2"
    first, third = rows_of(tokenizer, str(path), bad_rows="skip")
    assert (first.metadata, third.prompt, third.row_id) == ({"a": 1}, "3", f"{path}:row 3")


def test_parquet_messages_lose_the_columns_that_other_rows_brought(tokenizer, tmp_path):
    path = tmp_path / "rows.parquet"
    turns = [{"role": "user", "content": "1"}]
    call = [
        {"role": "assistant", "content": None, "tool_calls": ["f"]},
        {"role": "tool", "content": "2"},
    ]
    pq.write_table(pa.Table.from_pylist([row(turns), row(call)]), path)
    quiet = with_template("{{ messages[-1]['content'] }}")
    first, second = rows_of(quiet, str(path))
    assert first.prompt == turns
    assert second.prompt == call


def test_parquet_tools_and_calls_lose_the_fields_that_others_brought(tokenizer, tmp_path):
    path = tmp_path / "rows.parquet"
    tools = [
        {"name": "add", "parameters": {"a": {"type": "int"}}},
        {"name": "say", "parameters": {"text": {"type": "str"}}},
    ]
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {"text": "x"}}]
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "2"},
    ]
    rows = [
        row(turns, tools=tools, metadata={"a": 1, "b": None}),
        row(turns, tools=None, metadata={"a": None, "b": 2}),
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = (raw.load() for raw in read_rows(find_entry(str(path), tmp_path)))
    assert first["tools"] == tools
    assert second["tools"] is None
    assert first["prompt"] == second["prompt"] == turns
    assert first["metadata"] == {"a": 1, "b": None}  # rewards may look for it


def test_a_file_that_is_not_parquet_is_named(tokenizer, tmp_path):
    (tmp_path / "rows.parquet").write_text("no")
    assert refused(tokenizer, str(tmp_path / "rows.parquet")).where.endswith("rows.parquet")


def test_a_file_of_unknown_kind_is_named(tokenizer, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b")
    assert ".jsonl" in refused(tokenizer, str(tmp_path / "rows.csv")).expected


def write_datasets_folder(folder, records):
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(records)
    path = str(folder / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_hugging_face_datasets_folder_is_read(tokenizer, tmp_path):
    write_datasets_folder(tmp_path / "set", [row("1"), row("2"), row("3")])
    prompts = [r.prompt for r in rows_of(tokenizer, str(tmp_path / "set") + "@[-2:]")]
    assert prompts == ["2", "3"]


def test_a_folder_with_several_splits_asks_for_one(tokenizer, tmp_path):
    for split in ("train", "test"):
        write_datasets_folder(tmp_path / "set" / split, [row(split[1:2])])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "name the split" in refused(tokenizer, str(tmp_path / "set")).fix
    assert [r.prompt for r in rows_of(tokenizer, str(tmp_path / "set/test"))] == ["e"]


def test_another_folder_suggests_a_glob(tokenizer, tmp_path):
    (tmp_path / "a.txt").touch()
    assert "*.jsonl" in refused(tokenizer, str(tmp_path)).fix


def test_lists_are_read_one_after_the_other(tokenizer, write_jsonl):
    first = write_jsonl(row("1"), row("2"), row("3"), name="a.jsonl")
    second = write_jsonl(row("4"), row("5"), name="b.jsonl")
    paths = (f"{first}@[-2:]", second)
    assert [r.prompt for r in rows_of(tokenizer, paths)] == ["2", "3", "4", "5"]
    assert [r.prompt for r in rows_of(tokenizer, paths, max_rows=3)] == ["2", "3", "4"]


def test_every_part_of_a_mixture_must_have_rows(tokenizer, write_jsonl):
    full, empty = write_jsonl(row(), name="a.jsonl"), write_jsonl(name="b.jsonl")
    assert refused(tokenizer, {full: 1.0, empty: 2.0}).where == empty


def test_max_rows_spares_reading_the_rest(tokenizer, write_jsonl):
    (only,) = rows_of(tokenizer, write_jsonl(row("1"), "{"), max_rows=1)
    assert only.prompt == "1"
