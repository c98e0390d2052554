"""Tiny models, and an embedded engine served inside the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.engine.embedded import server
from rollmill.engine.embedded.model import ModelRunner

VOCAB = 64
EOS = 1
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def make_model(config: Any, seed: int = 0) -> Any:
    """A random model with weights large enough to have opinions."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3 if "embed" in name else weight.shape[-1] ** -0.5)
    return model


def save_tokenizer(folder: Path) -> None:
    """One token per printable character; ids 0 and 1 are special."""
    characters = "0123456789abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTU.,:"
    vocab = {"<bos>": 0, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(characters)}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<bos>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    fast.save_pretrained(folder)


def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of a whole sequence by an ordinary forward: `[tokens, vocab]`."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


def plain_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of `tokens[1:]`, each given those before it."""
    logprobs = (plain_logits(model, tokens) / temperature).log_softmax(-1)
    return [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])]


@asynccontextmanager
async def serving(
    folder: Path, *, context_length: int | None = None, **settings: Any
) -> AsyncIterator[TestClient[Any, Any]]:
    """A client of an engine that serves `folder`."""
    config = EmbeddedEngineConfig(**{"num_threads": 1, "device": "cpu", **settings})
    runner = ModelRunner(str(folder), config, context_length=context_length)
    tokenizers = server.load_tokenizers(str(folder), is_given=False)
    app = server.build_app(
        runner,
        tokenizers,
        config,
        model_path=str(folder),
        tokenizer_path=str(folder),
        weight_version="v0",
    )
    client = TestClient(TestServer(app))
    await client.start_server()
    try:
        yield client
    finally:
        await client.close()


async def post(client: TestClient[Any, Any], path: str, body: Any) -> Any:
    """The JSON answer of a call that must succeed."""
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def refused(client: TestClient[Any, Any], path: str, body: Any) -> Any:
    """The JSON answer of a call that must be refused with 400."""
    async with client.post(path, json=body) as response:
        assert response.status == 400, await response.text()
        return await response.json()
