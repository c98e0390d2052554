"""Log-probs and entropies of chosen tokens from hidden states, a chunk of logits at a time.

A vocabulary-sized row per token is the largest thing in a training step. Here such rows exist for
`chunk_tokens` tokens at once, in the forward pass and again in the backward pass, which computes
them anew instead of keeping them.

Formulas, with z the final logits of a token (scaled, soft-capped, divided by the temperature) and
p = softmax(z): log-prob = z_target − logsumexp(z), entropy H = logsumexp(z) − Σ p·z, and
∂log-prob/∂z = onehot − p, ∂H/∂z = −p·(z − Σ p·z).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """The output layer of a language model.

    Attributes:
        weight: [V, H].
        bias: [V] or None.
        scale: logits are multiplied by it (Granite, Cohere).
        softcap: logits become softcap·tanh(logits / softcap) (Gemma 2); None is off.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def on(self, layer: torch.nn.Linear) -> Head:
        """The same head with the weights that `layer` has now (sharding replaces them)."""
        return replace(self, weight=layer.weight, bias=layer.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, V] final logits of `hidden` [T, H], in at least float32."""
        raw = torch.nn.functional.linear(
            hidden, self.weight.to(hidden.dtype), _cast(self.bias, hidden.dtype)
        )
        return self.transform(raw.to(_at_least_float32(raw.dtype)))

    def transform(self, logits: Tensor) -> Tensor:
        """Scale and soft cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def chunked_log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution; both [T], at least float32.

    Args:
        hidden: [T, H] last hidden states, in the compute precision.
        head: the output layer; gradients reach its weight and bias.
        targets: int64 [T], the token to score after each hidden state.
        temperature: logits are divided by it, as the sampler did.
        chunk_tokens: rows of logits held at once.
    """
    scores: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, head, temperature, chunk_tokens
    )
    return scores


def log_probs_from_logits(
    logits: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same from full logits [T, V], for models whose head is not known; plain autograd."""
    scaled = logits.to(_at_least_float32(logits.dtype)) / temperature
    all_log_probs = torch.log_softmax(scaled, dim=-1)
    entropies = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return all_log_probs.gather(-1, targets[:, None]).squeeze(-1), entropies


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward keeps one log-sum-exp and one entropy per token; backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = _at_least_float32(hidden.dtype)
        log_probs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        log_sums, entropies = torch.empty_like(log_probs), torch.empty_like(log_probs)
        cast_weight, cast_bias = weight.to(hidden.dtype), _cast(bias, hidden.dtype)
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            raw = torch.nn.functional.linear(hidden[rows], cast_weight, cast_bias).to(dtype)
            logits = head.transform(raw).div_(temperature)
            log_sums[rows] = torch.logsumexp(logits, dim=-1)
            chosen = logits.gather(-1, targets[rows, None]).squeeze(-1)
            log_probs[rows] = chosen - log_sums[rows]
            probabilities = (logits - log_sums[rows, None]).exp_()
            entropies[rows] = log_sums[rows] - probabilities.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies)
        ctx.head, ctx.temperature, ctx.chunk_tokens = head, temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropies = ctx.saved_tensors
        log_prob_grads, entropy_grads = grads
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        cast_weight, cast_bias = weight.to(hidden.dtype), _cast(bias, hidden.dtype)
        for start in range(0, len(targets), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            raw = torch.nn.functional.linear(hidden[rows], cast_weight, cast_bias)
            grad_raw = _logit_gradient(
                raw.to(log_sums.dtype),
                ctx.head,
                ctx.temperature,
                targets[rows],
                log_sums[rows],
                entropies[rows],
                None if log_prob_grads is None else log_prob_grads[rows],
                None if entropy_grads is None else entropy_grads[rows],
            )
            narrow = grad_raw.to(hidden.dtype)
            grad_hidden[rows] = narrow @ cast_weight
            if grad_weight is not None:
                grad_weight.addmm_(narrow.T.to(weight.dtype), hidden[rows].to(weight.dtype))
            if grad_bias is not None:
                grad_bias += grad_raw.sum(0).to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _logit_gradient(
    raw: Tensor,
    head: Head,
    temperature: float,
    targets: Tensor,
    log_sums: Tensor,
    entropies: Tensor,
    log_prob_grads: Tensor | None,
    entropy_grads: Tensor | None,
) -> Tensor:
    """∂loss/∂raw logits [T, V] from ∂loss/∂log-prob and ∂loss/∂entropy [T]; may overwrite `raw`."""
    capped = head.transform(raw)
    slope = None if head.softcap is None else 1 - (capped / head.softcap).square()
    shifted = capped.div_(temperature).sub_(log_sums[:, None])
    factor = head.scale / temperature
    if log_prob_grads is None:
        log_prob_grads = torch.zeros_like(log_sums)
    if entropy_grads is None:
        gradient = shifted.exp_().mul_(log_prob_grads[:, None] * -factor)
    else:
        # p·(z − Σ p·z) = p·(log p + H)
        inner = (shifted + entropies[:, None]).mul_(entropy_grads[:, None])
        inner.add_(log_prob_grads[:, None])
        gradient = shifted.exp_().mul_(inner).mul_(-factor)
    gradient.scatter_add_(1, targets[:, None], log_prob_grads[:, None] * factor)
    return gradient if slope is None else gradient.mul_(slope)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
