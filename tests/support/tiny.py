"""A model that learns in seconds, for tests of the whole system.

A three-layer Llama over 48 characters gets five digits and is to answer with the same digits
sorted. `warm_start` shows it the format and three behaviours (sorting 45 %, copying 30 %, sorting
in reverse 25 % of the time); what is left for RL is to prefer the right one.

Expected exact match over 256 held-out prompts after the warm start: greedy about 0.35 to 0.6.
GRPO with 32 prompts x 8 answers at a learning rate of 3e-4 brings it above 0.9 in 60 steps.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz >=,.+-:\n"
VOCABULARY = (PAD, EOS, UNKNOWN, *CHARACTERS)

NUM_DIGITS = 5
MAX_NEW_TOKENS = NUM_DIGITS + 1
CONTEXT_LENGTH = 32

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)

REWARD_SOURCE = '''"""Five digits, sorted: right or wrong."""


def reward(sample):
    return float(sample.response == sample.label)
'''


@dataclass(frozen=True)
class TaskFiles:
    """Where the task was written: data sets and the reward function's file."""

    train: Path
    eval: Path
    reward: Path

    @property
    def reward_function(self) -> str:
        return f"{self.reward}:reward"


def make_tiny_model(folder: Path, seed: int = 0, *, hidden_size: int = 96, layers: int = 3) -> Path:
    """Write an untrained model with its tokenizer as a Hugging Face folder; returns it."""
    heads = hidden_size // 32
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a chat template that ends prompts with `>`."""
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT_LENGTH,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_task_files(
    folder: Path, seed: int = 0, *, num_train: int = 2048, num_eval: int = 256
) -> TaskFiles:
    """Write `train.jsonl`, `eval.jsonl` (no prompt in both) and `reward.py` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed).sample(range(10**NUM_DIGITS), num_train + num_eval)
    prompts = [f"{number:0{NUM_DIGITS}d}" for number in numbers]
    files = TaskFiles(folder / "train.jsonl", folder / "eval.jsonl", folder / "reward.py")
    _write_rows(files.train, prompts[:num_train])
    _write_rows(files.eval, prompts[num_train:])
    files.reward.write_text(REWARD_SOURCE, encoding="utf-8")
    return files


def _write_rows(path: Path, prompts: list[str]) -> None:
    rows = [{"prompt": prompt, "label": "".join(sorted(prompt))} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def warm_start(
    folder: Path, seed: int = 0, *, steps: int = 160, batch: int = 64, lr: float = 2e-3
) -> Path:
    """Fine-tune the model in `folder` in place on demonstrations of mixed quality; returns it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.train()
        rng = random.Random(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 10)
            ids_BT = torch.tensor([_encode(_demonstration(rng)) for _ in range(batch)])
            _loss(model, ids_BT).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder)
    finally:
        torch.set_num_threads(num_threads)
    return folder


def _demonstration(rng: random.Random) -> str:
    prompt = f"{rng.randrange(10**NUM_DIGITS):0{NUM_DIGITS}d}"
    ascending = "".join(sorted(prompt))
    (answer,) = rng.choices((ascending, prompt, ascending[::-1]), weights=(45, 30, 25))
    return f"{prompt}>{answer}"


def _encode(text: str) -> list[int]:
    return [*(VOCABULARY.index(character) for character in text), VOCABULARY.index(EOS)]


def _loss(model: LlamaForCausalLM, ids_BT: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the answer and the end of sequence, given the prompt."""
    logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits[:, NUM_DIGITS:]
    targets_BT = ids_BT[:, NUM_DIGITS + 1 :]
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def exact_match(folder: Path, eval_file: Path, *, temperature: float = 0.0, seed: int = 0) -> float:
    """Share of prompts in `eval_file` that the model in `folder` answers rightly.

    Independent of rollmill's engine, so that it can check what the engine reports.
    """
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in eval_file.read_text(encoding="utf-8").splitlines()]
    ids_BT = torch.tensor([_encode(f"{row['prompt']}>")[:-1] for row in rows])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(MAX_NEW_TOKENS):
        logits_BV = model(input_ids=ids_BT, use_cache=False).logits[:, -1]
        if temperature:
            probabilities_BV = torch.softmax(logits_BV / temperature, dim=-1)
            next_B1 = torch.multinomial(probabilities_BV, 1, generator=generator)
        else:
            next_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    answers = [_decode(ids) for ids in ids_BT[:, NUM_DIGITS + 1 :].tolist()]
    hits = [answer == row["label"] for answer, row in zip(answers, rows, strict=True)]
    return sum(hits) / len(hits)


def _decode(ids: list[int]) -> str:
    end = VOCABULARY.index(EOS)
    kept = ids[: ids.index(end)] if end in ids else ids
    return "".join(VOCABULARY[number] for number in kept)
