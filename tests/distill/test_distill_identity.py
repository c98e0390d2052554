"""Hashes that tell models and tokenizers apart, and do not care how files are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rollmill.distill.identity import tokenizer_identity, weights_hash
from rollmill.errors import ModelError
from rollmill.models import end_ids_of, vocab_size_of
from support.tiny import VOCABULARY, make_tiny_model, make_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden_size=32, layers=1)


def test_the_hash_is_of_the_weights_and_not_of_the_files(model: Path, tmp_path: Path) -> None:
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert weights_hash(tmp_path / "sharded") == weights_hash(model)


def test_one_changed_weight_or_another_precision_is_another_model(
    model: Path, tmp_path: Path
) -> None:
    loaded: Any = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        loaded.model.norm.weight[3] += 1e-6
    loaded.save_pretrained(tmp_path / "changed")
    loaded.to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    hashes = {weights_hash(tmp_path / name) for name in ("model", "changed", "narrow")}
    assert len(hashes) == 3


def test_folders_without_usable_weights_are_errors(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no safetensors weights"):
        weights_hash(tmp_path / "empty")
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"cannot be read[\s\S]*ends at byte"):
        weights_hash(model)


@pytest.mark.parametrize(
    "content",
    [
        b"\x0e\x00\x00\x00\x00\x00\x00\x00 not json here",
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
        b'\x08\x00\x00\x00\x00\x00\x00\x00{"a":[]}',
        b"\xff" * 16,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n",
        b"",
    ],
)
def test_what_is_no_safetensors_file_is_an_error(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read") as error:
        weights_hash(model)
    assert "git lfs pull" in str(error.value.fix)


def change_vocabulary(tokenizer: Any) -> None:
    tokenizer.add_tokens(["ab"])


def change_specials(tokenizer: Any) -> None:
    tokenizer.eos_token = "<pad>"


def change_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages }}"


def change_splitting(tokenizer: Any) -> None:
    from tokenizers.normalizers import Lowercase

    tokenizer.backend_tokenizer.normalizer = Lowercase()


@pytest.mark.parametrize(
    "change, parts",
    [
        (change_vocabulary, {"vocabulary", "probes"}),
        (change_specials, {"special_ids"}),
        (change_template, {"template"}),
        (change_splitting, {"probes"}),
    ],
)
def test_tokenizers_are_told_apart_by_what_differs(change: Any, parts: set[str]) -> None:
    other = make_tokenizer()
    change(other)
    mine = tokenizer_identity(make_tokenizer())
    assert mine.differences(tokenizer_identity(make_tokenizer())) == []
    assert set(mine.differences(tokenizer_identity(other))) == parts


def test_merges_are_part_of_a_tokenizer() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def tokenizer(merges: list[tuple[str, str]]) -> Any:
        vocabulary = {"a": 0, "b": 1, "ab": 2, "ba": 3}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)))

    first, second = tokenizer([("a", "b"), ("b", "a")]), tokenizer([("b", "a"), ("a", "b")])
    differences = tokenizer_identity(first).differences(tokenizer_identity(second))
    assert differences == ["merges"]


def test_a_model_says_how_many_tokens_it_knows_and_which_end_an_answer(model: Path) -> None:
    assert vocab_size_of(model) == len(VOCABULARY)
    assert end_ids_of(model) == [VOCABULARY.index("<eos>")]
