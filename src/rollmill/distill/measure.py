"""How far a student is from its teacher: the reverse KL, exact in every state that it visits.

The answers are fresh, drawn from the student itself, and in each of their states the divergence is
summed over the whole vocabulary; only which states are visited is a sample. Independent of engines
and trainer, so that it can check both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging


@dataclass(frozen=True)
class ReverseKl:
    """KL(student ‖ teacher) over answers that the student just wrote, in nats.

    Attributes:
        per_answer: mean over answers of the sum over their states: an unbiased estimate of the
            divergence between the two distributions over whole answers.
        standard_error: of `per_answer`.
        per_token: sum over all states / number of states.
        num_answers: answers drawn.
        num_tokens: states visited.
    """

    per_answer: float
    standard_error: float
    per_token: float
    num_answers: int
    num_tokens: int


def load_model(folder: str | Path) -> Any:
    """The causal language model in a folder, in float32, without its dropout."""
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()


@torch.no_grad()
def reverse_kl(
    student: Any,
    teacher: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    seed: int = 0,
    batch_size: int = 32,
) -> ReverseKl:
    """Draw one answer to each prompt from the student and compare both models in all its states.

    Args:
        student: a transformers causal language model; answers are drawn from it at temperature 1.
        teacher: another one over the same token ids.
        prompts: token ids of each prompt, none empty.
        max_new_tokens: answers end there at the latest.
        end_ids: tokens that end an answer; its last state is the one that chose the end.
        seed: of the draws.
        batch_size: answers at once.
    """
    sums: list[float] = []
    num_tokens = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            ids, mask, width = _padded(batch)
            tokens = _draw(student, ids, mask, max_new_tokens, end_ids)
            is_state = _states(tokens[:, width:], end_ids)
            full_mask = torch.cat([mask, is_state.to(mask.dtype)], dim=1)
            kl = _divergence(student, teacher, tokens, full_mask, width)
            sums += (kl * is_state).sum(dim=1).tolist()
            num_tokens += int(is_state.sum())
    values = np.array(sums)
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
    total = float(values.sum())
    return ReverseKl(float(values.mean()), error, total / num_tokens, len(values), num_tokens)


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, int]:
    """Prompts as one matrix, padded on the left, and where they are."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids, mask, width


def _draw(
    model: Any, ids: Tensor, mask: Tensor, max_new_tokens: int, end_ids: Collection[int]
) -> Tensor:
    """Prompts with answers drawn from the model's own distribution, whatever defaults it has.

    A configuration that is passed to `generate` is filled up with the model's own (its repetition
    penalty, say); so the model's own is replaced meanwhile.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(end_ids),
        pad_token_id=0,
    )
    try:
        tokens: Tensor = model.generate(input_ids=ids, attention_mask=mask)
    finally:
        model.generation_config = own
    return tokens


def _states(answers: Tensor, end_ids: Collection[int]) -> Tensor:
    """bool [B, R]: the tokens of each answer, its end included, what comes after it left out."""
    is_end = torch.isin(answers, torch.tensor(sorted(end_ids)))
    num_ends_before = is_end.long().cumsum(dim=1) - is_end.long()
    return num_ends_before == 0


def _divergence(student: Any, teacher: Any, tokens: Tensor, mask: Tensor, width: int) -> Tensor:
    """float64 [B, R]: KL(student ‖ teacher) in the state before each answer token."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

    def logits_of(model: Any) -> Tensor:
        kept = tokens.shape[1] - width + 1
        logits: Tensor = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=kept,
        ).logits
        return logits[:, :-1]

    def divergence(own: Tensor, other: Tensor) -> Tensor:
        log_probs = own.double().log_softmax(dim=-1)
        return (log_probs.exp() * (log_probs - other.double().log_softmax(dim=-1))).sum(dim=-1)

    rows = zip(logits_of(student), logits_of(teacher), strict=True)
    return torch.stack([divergence(own, other) for own, other in rows])
