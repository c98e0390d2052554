"""The embedded engine on a GPU says what an ordinary forward pass on the CPU says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_helpers import VOCAB, plain_logprobs, post, serving
from transformers import AutoModelForCausalLM

DEVICE = "cuda"
NUM_PROMPTS = 12

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def generated(folder: Path, **settings: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts of many lengths at the same time: (prompt, answer, its log-probs)."""
    random = np.random.default_rng(0)
    prompts = [random.integers(2, VOCAB, 3 + 5 * n).tolist() for n in range(NUM_PROMPTS)]
    sampling = {"max_new_tokens": 24, "temperature": 0.8, "ignore_eos": True}

    async def run() -> list[Any]:
        async with serving(folder, device=DEVICE, **settings) as client:
            bodies = [
                {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
                for prompt in prompts
            ]
            return await asyncio.gather(*(post(client, "/generate", body) for body in bodies))

    return [
        (
            prompt,
            answer["output_ids"],
            [log_prob for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"]],
        )
        for prompt, answer in zip(prompts, asyncio.run(run()), strict=True)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.25)])
def test_log_probs_are_those_of_a_plain_forward_pass(
    dtype: str, tolerance: float, llama_folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    for prompt, answer, log_probs in generated(llama_folder, dtype=dtype):
        assert len(answer) == len(log_probs) == 24
        expected = plain_logprobs(model, prompt + answer, temperature=0.8)[len(prompt) - 1 :]
        assert log_probs == pytest.approx(expected, abs=tolerance)
