"""Does the engine compute what the model computes?

The engine replaces the attention of every model it loads. A model that asks attention for
something this engine does not know would still write text, only with wrong log-probs. So the
engine compares itself with the model's own attention on a few tokens when it starts, and
refuses to serve a model that it would get wrong.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from rollmill.errors import ModelError

logger = logging.getLogger(__name__)

NUM_TOKENS = 12
_REFERENCE = "eager"
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1.0, torch.float16: 0.5}
"""Largest difference of a log-prob that is rounding rather than error, by precision."""


def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor | None:
    """Log-probs `[tokens, vocab]` by the model's own attention; None when it has none."""
    ours = model.config._attn_implementation
    device = model.get_input_embeddings().weight.device
    try:
        model.set_attn_implementation(_REFERENCE)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits
    except (ValueError, NotImplementedError):
        return None
    finally:
        model.set_attn_implementation(ours)
    logprobs: torch.Tensor = logits[0].float().log_softmax(dim=-1)
    return logprobs


def check_agreement(
    ours: torch.Tensor, reference: torch.Tensor | None, dtype: torch.dtype, name: str
) -> None:
    """Compare log-probs of the last tokens of a sequence.

    Args:
        ours: `[n, vocab]`, by the engine's way of prefilling and decoding.
        reference: `[m, vocab]` with `m >= n`, by `reference_logprobs`.
        dtype: the model's precision, which sets what is tolerated.
        name: the model's class, for the message.

    Raises:
        ModelError: they differ by more than rounding.
    """
    if reference is None:
        logger.warning("%s has no attention of its own to check the engine against", name)
        return
    expected = reference[-ours.shape[0] :]
    # Tokens that are as good as impossible have log-probs of no account.
    likely = expected > -20
    worst = float((ours - expected)[likely].abs().max())
    logger.info("log-probs agree with the model's own attention to %.1e", worst)
    if not worst <= _LIMITS.get(dtype, 1.0):
        raise ModelError(
            f"{name} computes other log-probs on the embedded engine than on its own",
            expected=f"a difference of at most {_LIMITS.get(dtype, 1.0)}",
            found=f"{worst:.2g}",
            fix="serve this model with SGLang instead",
        )
