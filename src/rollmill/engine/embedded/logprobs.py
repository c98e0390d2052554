"""Log-probs besides those of sampled tokens: of prompts, of likely and of named tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from rollmill.engine.embedded.sequence import TopLogprobs
from rollmill.engine.embedded.steps import Chunk

_ROWS_AT_ONCE = 32


def top_logprobs(logits_V: torch.Tensor, log_total: torch.Tensor, count: int) -> TopLogprobs:
    """The `count` most likely tokens of one row."""
    values, ids = logits_V.topk(min(count, logits_V.shape[0]))
    return list(zip((values.double() - log_total).tolist(), ids.tolist(), strict=True))


def logprobs_of(logits_V: torch.Tensor, log_total: torch.Tensor, ids: Seq[int]) -> TopLogprobs:
    """Log-probs of given tokens in one row."""
    where = torch.tensor(ids, device=logits_V.device, dtype=torch.long)
    return list(zip((logits_V[where].double() - log_total).tolist(), ids, strict=True))


def _log_totals(logits_TV: torch.Tensor) -> torch.Tensor:
    """`log(sum(exp(logits)))` of each row, float64 to 1e-7; a few rows at a time, since another
    copy of all of them would be hundreds of megabytes."""
    totals = []
    for start in range(0, len(logits_TV), _ROWS_AT_ONCE):
        rows = logits_TV[start : start + _ROWS_AT_ONCE]
        top = rows.amax(dim=-1, keepdim=True)
        sums = (rows - top).exp_().sum(dim=-1, dtype=torch.float64)
        totals.append(sums.log() + top[:, 0].double())
    return torch.cat(totals)


def note_input_logprobs(chunk: Chunk, first: int, logits: torch.Tensor) -> None:
    """Log-probs of prompt tokens `first + 1 ..`, at temperature 1 as SGLang gives them."""
    sequence = chunk.fill.sequence
    noted, wanted = sequence.input_logprobs, sequence.logprobs
    count = min(logits.shape[0], len(sequence.prompt) - 1 - first)
    log_totals = _log_totals(logits)
    targets = torch.tensor(sequence.prompt[first + 1 : first + 1 + count], device=logits.device)
    chosen = logits[:count].gather(1, targets[:, None])[:, 0].double() - log_totals[:count]
    noted.chosen.extend(chosen.tolist())
    for row in range(count):
        if wanted.num_top:
            noted.top.append(top_logprobs(logits[row], log_totals[row], wanted.num_top))
        if wanted.token_ids:
            noted.by_id.append(logprobs_of(logits[row], log_totals[row], wanted.token_ids))
