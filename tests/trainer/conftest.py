"""Tiny random models and batches for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollmill.sample import Group, Sample, Segment, Status

VOCAB = 61

torch.set_num_threads(1)


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    return Qwen3ForCausalLM(config).eval()


def make_group(
    index: int,
    rewards: list[float | dict[str, float] | None],
    *,
    rng: np.random.Generator,
    prompt_length: int = 5,
    lengths: list[int] | None = None,
    log_prob: float | None = None,
) -> Group:
    """A group with random tokens; answers use few tokens, so that they share beginnings."""
    prompt = rng.integers(3, VOCAB, prompt_length)
    lengths = lengths or rng.integers(1, 9, len(rewards)).tolist()
    samples = []
    for attempt, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        tokens = rng.integers(3, 6, length)
        log_probs = np.full(length, log_prob) if log_prob is not None else -rng.random(length) * 4
        samples.append(
            Sample(
                prompt_tokens=prompt,
                index=index * 100 + attempt,
                group_index=index,
                attempt=attempt,
                segments=[Segment.from_engine(tokens, log_probs, 0)] if length else [],
                status=Status.COMPLETED,
                reward=reward,
            )
        )
    return Group(index, samples)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., str]:
    def save(model: Any, name: str = "model") -> str:
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save
