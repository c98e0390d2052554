"""Token texts: joined they are the text; what has no text shows as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollmill.viewer.token_pieces import TokenPieces
from rollmill.viewer.tokenizer import RunTokenizer, read_config
from support.made_run import END, byte_tokenizer

BYTES = byte_tokenizer()
PIECES = TokenPieces(BYTES)


def metaspace() -> Tokenizer:
    """Words that carry their leading space, as SentencePiece writes them."""
    vocabulary = {word: n for n, word in enumerate(["<unk>", "▁a", "a", "▁good", "▁day", "s"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_texts_joined_are_the_text(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False).ids
    texts = PIECES.texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


@given(ids=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300), max_size=40))
def test_any_ids_have_texts(ids: list[int]) -> None:
    assert len(PIECES.texts(ids)) == len(ids)


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    ids = BYTES.encode("a€b", add_special_tokens=False).ids
    assert PIECES.texts(ids) == ["a", "", "", "€", "b"]


def test_bytes_that_spell_nothing_show_as_replacement_characters() -> None:
    half = BYTES.encode("€", add_special_tokens=False).ids[:2]
    letter = BYTES.encode("x", add_special_tokens=False).ids
    assert PIECES.texts([*half, *letter]) == ["\ufffd", "\ufffd", "x"]


def test_an_id_outside_the_vocabulary_shows_as_its_number() -> None:
    assert PIECES.texts([999_999, -3]) == ["⟨999999⟩", "⟨-3⟩"]


def test_special_tokens_are_shown_and_marked() -> None:
    number = BYTES.token_to_id(END)
    assert PIECES.texts([number]) == [END]
    assert PIECES.is_special(number)
    assert not PIECES.is_special(65)


def test_a_leading_space_is_kept_where_the_tokenizer_hides_it() -> None:
    pieces = TokenPieces(metaspace())
    assert pieces.texts([3, 4, 5]) == [" good", " day", "s"]


def test_the_tokenizer_of_the_run_folder_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    BYTES.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    tokenizer = RunTokenizer(tmp_path, {"model": {"path": "no/such/folder"}})
    assert tokenizer.problem is None
    assert "".join(tokenizer.texts(BYTES.encode("hé").ids).texts) == "hé"


def test_the_tokenizer_of_the_model_is_used(tmp_path: Path) -> None:
    BYTES.save(str(tmp_path / "tokenizer.json"))
    tokenizer = RunTokenizer(tmp_path / "run", {"model": {"path": str(tmp_path)}})
    assert tokenizer.problem is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "names no model"),
        ({"model": {"path": "no/such/folder"}}, "does not exist"),
        ({"model": {"path": None}}, "names no model"),
    ],
)
def test_without_a_tokenizer_there_are_ids_and_a_reason(
    config: dict[str, object], reason: str, tmp_path: Path
) -> None:
    tokenizer = RunTokenizer(tmp_path, config)
    assert tokenizer.texts([5, 7]).texts == ["⟨5⟩", "⟨7⟩"]
    assert reason in str(tokenizer.problem)


def test_a_broken_tokenizer_file_is_a_reason_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    tokenizer = RunTokenizer(tmp_path, {})
    assert tokenizer.texts([5]).texts == ["⟨5⟩"]
    assert tokenizer.problem


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "\x00"])
def test_a_broken_configuration_is_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert read_config(tmp_path) == {}
