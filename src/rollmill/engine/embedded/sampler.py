"""Choosing the next token of every sequence of the batch at once.

The log-prob reported for a token is that of `softmax(logits / temperature)`: after penalties, bias
and temperature, before top-k, top-p and min-p, as SGLang reports it by default. Greedy requests
use temperature 1.

A token is the inverse of the cumulative distribution at one uniform number, and that number
depends on the request's seed and the output position alone. So a request writes the same text
whatever else is in the batch (up to the rounding of the logits).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rollmill.engine.embedded.logprobs import logprobs_of, top_logprobs
from rollmill.engine.embedded.sequence import Sequence, TopLogprobs

_BLOCK = 256
"""Tokens whose probabilities are summed first; the search then looks into one such block."""
_FEW = 1024
"""Most likely tokens that are sorted first; all of them are when these do not suffice."""


@dataclass(slots=True)
class Sampled:
    """What was chosen, one entry per row."""

    tokens: list[int]
    logprobs: list[float]
    is_finite: list[bool]
    """False where the model computed NaN or infinity: the token means nothing."""
    top: dict[int, TopLogprobs] = field(default_factory=dict)
    by_id: dict[int, TopLogprobs] = field(default_factory=dict)


class Sampler:
    """Samples for batches of up to any size; keeps its work space between steps.

    Args:
        stop_ids: tokens that end a sequence; held back until `min_new_tokens` are written.
    """

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = stop_ids
        self._space: torch.Tensor | None = None

    def sample(self, sequences: Seq[Sequence], logits_BV: torch.Tensor) -> Sampled:
        """The next token of each sequence from its row of logits (changed in place)."""
        for row, sequence in enumerate(sequences):
            if sequence.params.edits_logits:
                self._edit(logits_BV[row], sequence)
        temperatures = [s.params.temperature for s in sequences]
        if any(t != 1.0 for t in temperatures):
            logits_BV.div_(torch.tensor(temperatures, device=logits_BV.device)[:, None])
        top_B = logits_BV.amax(dim=-1, keepdim=True)
        weights = self._exponentials(logits_BV, top_B)
        block_sums = weights.sum(dim=-1, dtype=torch.float32)
        totals_B = block_sums.double().sum(dim=-1)
        tokens_B = self._choose(sequences, logits_BV, weights, block_sums)
        chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
        log_totals_B = top_B[:, 0].double() + totals_B.log()
        logprobs_B = chosen_B.double() - log_totals_B
        sampled = Sampled(tokens_B.tolist(), logprobs_B.tolist(), torch.isfinite(totals_B).tolist())
        self._report_more(sequences, logits_BV, log_totals_B, sampled)
        return sampled

    def _edit(self, logits_V: torch.Tensor, sequence: Sequence) -> None:
        """Penalties, bias and held-back stop tokens of one row; penalties count output tokens."""
        params = sequence.params
        if sequence.output:
            ids, counts = np.unique(np.asarray(sequence.output), return_counts=True)
            where = torch.as_tensor(ids, device=logits_V.device)
            seen = logits_V[where]
            if params.repetition_penalty != 1.0:
                scale = params.repetition_penalty
                seen = torch.where(seen > 0, seen / scale, seen * scale)
            times = torch.as_tensor(counts, device=logits_V.device, dtype=seen.dtype)
            logits_V[where] = seen - params.frequency_penalty * times - params.presence_penalty
        for token, bias in params.logit_bias:
            logits_V[token] += bias
        if len(sequence.output) < params.min_new_tokens:
            stops = sorted(params.stop_token_ids | self._stop_ids)
            logits_V[torch.tensor(stops, device=logits_V.device, dtype=torch.long)] = float("-inf")

    def _exponentials(self, logits_BV: torch.Tensor, top_B: torch.Tensor) -> torch.Tensor:
        """`exp(logits - max)` as `[rows, blocks, 256]`, padded with zeros."""
        rows, vocab = logits_BV.shape
        padded = -(-vocab // _BLOCK) * _BLOCK
        space = self._space
        if (
            space is None
            or space.shape[0] < rows
            or space.shape[1] != padded
            or space.device != logits_BV.device
        ):
            space = torch.zeros(rows, padded, dtype=torch.float32, device=logits_BV.device)
            self._space = space
        used = space[:rows]
        torch.sub(logits_BV, top_B, out=used[:, :vocab])
        used[:, :vocab].exp_()
        return used.view(rows, padded // _BLOCK, _BLOCK)

    def _choose(
        self,
        sequences: Seq[Sequence],
        logits_BV: torch.Tensor,
        weights: torch.Tensor,
        block_sums: torch.Tensor,
    ) -> torch.Tensor:
        greedy = [s.params.is_greedy for s in sequences]
        if all(greedy):
            return logits_BV.argmax(dim=-1)
        positions = [s.sampling_position for s in sequences]
        uniforms = uniform_numbers([s.seed for s in sequences], positions)
        u_B = torch.as_tensor(uniforms, device=logits_BV.device)
        tokens_B = _invert_two_level(weights, block_sums, u_B).clamp_(max=logits_BV.shape[1] - 1)
        filtered = [
            i for i, s in enumerate(sequences) if s.params.is_filtered and not s.params.is_greedy
        ]
        if filtered:
            rows = torch.tensor(filtered, device=logits_BV.device)
            flat = weights.flatten(1)[rows, : logits_BV.shape[1]]
            probs = flat / block_sums[rows].sum(dim=-1, keepdim=True)
            tokens_B[rows] = _sample_filtered([sequences[i] for i in filtered], probs, u_B[rows])
        if any(greedy):
            is_greedy = torch.tensor(greedy, device=logits_BV.device)
            tokens_B = torch.where(is_greedy, logits_BV.argmax(dim=-1), tokens_B)
        return tokens_B

    @staticmethod
    def _report_more(
        sequences: Seq[Sequence],
        logits_BV: torch.Tensor,
        log_totals_B: torch.Tensor,
        sampled: Sampled,
    ) -> None:
        for row, sequence in enumerate(sequences):
            wanted = sequence.logprobs
            if wanted.num_top:
                sampled.top[row] = top_logprobs(logits_BV[row], log_totals_B[row], wanted.num_top)
            if wanted.token_ids:
                sampled.by_id[row] = logprobs_of(
                    logits_BV[row], log_totals_B[row], wanted.token_ids
                )


def uniform_numbers(seeds: Seq[int], positions: Seq[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), by two rounds of SplitMix64's finalizer."""
    with np.errstate(over="ignore"):
        state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state + np.asarray(positions, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03))
    numbers: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _invert(weights_BN: torch.Tensor, targets_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulative weight exceeds the target, and the cumulative weight before it.

    A weight of zero is never chosen: its cumulative weight exceeds nothing that its predecessor's
    does not.
    """
    cumulative = weights_BN.double().cumsum(dim=-1)
    last = cumulative[:, -1]
    below = torch.nextafter(last, torch.zeros_like(last))
    targets = torch.minimum(targets_B, below)[:, None]
    index = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    index.clamp_(max=weights_BN.shape[1] - 1)
    before = torch.where(
        index > 0, cumulative.gather(1, (index - 1).clamp(min=0)[:, None])[:, 0], 0.0
    )
    return index, before


def _invert_two_level(
    weights: torch.Tensor, block_sums: torch.Tensor, u_B: torch.Tensor
) -> torch.Tensor:
    targets = u_B * block_sums.double().sum(dim=-1)
    block, before = _invert(block_sums, targets)
    inside = weights[torch.arange(weights.shape[0], device=weights.device), block]
    index, _ = _invert(inside, (targets - before).clamp(min=0))
    return block * _BLOCK + index


def _sample_filtered(
    sequences: Seq[Sequence], probs_BV: torch.Tensor, u_B: torch.Tensor
) -> torch.Tensor:
    """Sampling among the tokens that top-k, top-p and min-p keep.

    All three look at the full distribution, as SGLang's joint filter does: a token stays when
    it is among the k most likely, when the tokens before it hold no more than p, and when its
    probability is at least min-p times the best one's. The best token always stays.
    """
    vocab = probs_BV.shape[1]
    few = min(vocab, _FEW)
    tokens, kept = _kept(sequences, probs_BV, few)
    short = [] if few == vocab else kept[:, -1].gt(0).nonzero()[:, 0].tolist()
    index, _ = _invert(kept, u_B * kept.double().sum(dim=-1))
    chosen = tokens.gather(1, index[:, None])[:, 0]
    if short:
        rows = torch.tensor(short, device=probs_BV.device)
        all_tokens, all_kept = _kept([sequences[i] for i in short], probs_BV[rows], vocab)
        index, _ = _invert(all_kept, u_B[rows] * all_kept.double().sum(dim=-1))
        chosen[rows] = all_tokens.gather(1, index[:, None])[:, 0]
    return chosen


def _kept(
    sequences: Seq[Sequence], probs_BV: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most likely tokens and their probabilities, zero where they are filtered out."""
    probs, tokens = probs_BV.topk(count, dim=-1)
    device = probs.device
    # 2 rather than 1 for "all": rounded cumulative sums may pass 1.
    shares = [s.params.top_p if s.params.top_p < 1 else 2.0 for s in sequences]
    top_p = torch.tensor(shares, device=device)[:, None]
    min_p = torch.tensor([s.params.min_p for s in sequences], device=device)[:, None]
    top_k = [s.params.top_k if s.params.top_k > 0 else probs_BV.shape[1] for s in sequences]
    before = probs.cumsum(dim=-1) - probs
    keep = (before <= top_p) & (probs >= probs[:, :1] * min_p)
    keep &= torch.arange(count, device=device)[None] < torch.tensor(top_k, device=device)[:, None]
    keep[:, 0] = True
    return tokens, torch.where(keep, probs, 0.0)
