"""The task: five digits and `>`, to be answered with the same digits sorted.

Teachers learn it from demonstrations of mixed quality, so that they are distributions and no
functions: some answers are of another kind, and any digit may be a slip of the pen, any other one.
Teacher A saw copies of the prompt as the other kind, teacher B digits in falling order; both saw
the right answer equally often. One token is one character.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = ("<pad>", "<eos>", "<unk>", ">", *"0123456789")
IDS = {token: number for number, token in enumerate(VOCABULARY)}
END = IDS["<eos>"]
NUM_DIGITS = 5
MAX_NEW_TOKENS = NUM_DIGITS + 1
CONTEXT_LENGTH = 16
HEAD_DIM = 16

SHARES = {"A": (0.85, 0.15, 0.0), "B": (0.85, 0.0, 0.15)}
"""Per teacher, the shares of sorted, copied and falling answers among its demonstrations."""
SLIPS = 0.1
"""Share of the demonstrations' digits that are any digit."""

_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@dataclass(frozen=True)
class Prompts:
    """Different prompts to train on and to measure with, as the five digits."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]


def draw_prompts(seed: int, *, num_training: int, num_held_out: int) -> Prompts:
    """Prompts of a seed; none is in both lists."""
    numbers = random.Random(seed).sample(range(10**NUM_DIGITS), num_training + num_held_out)
    texts = tuple(f"{number:0{NUM_DIGITS}d}" for number in numbers)
    return Prompts(texts[:num_training], texts[num_training:])


def prompt_ids(prompt: str) -> list[int]:
    """The tokens of a prompt; all prompts have equally many."""
    return [*(IDS[digit] for digit in prompt), IDS[">"]]


def demonstrations(prompts: Sequence[str], teacher: str, seed: int) -> list[list[int]]:
    """An answer to each prompt, its end included, in the shares of teacher A or B."""
    rng = random.Random(f"{teacher}/{seed}")
    answers = []
    for prompt in prompts:
        rising = "".join(sorted(prompt))
        (text,) = rng.choices((rising, prompt, rising[::-1]), weights=SHARES[teacher])
        slips = [rng.choice("0123456789") if rng.random() < SLIPS else digit for digit in text]
        answers.append([*(IDS[digit] for digit in slips), END])
    return answers


def is_right(prompt: str, answer: Sequence[int]) -> bool:
    """Whether an answer, its end included, is the sorted digits."""
    return list(answer) == [*(IDS[digit] for digit in sorted(prompt)), END]


def make_model(seed: int, *, hidden_size: int, layers: int) -> LlamaForCausalLM:
    """A model with random weights."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT_LENGTH,
        pad_token_id=IDS["<pad>"],
        eos_token_id=END,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a model and its tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    """A data set for the commands."""
    rows = [{"prompt": text, "label": "".join(sorted(text))} for text in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
