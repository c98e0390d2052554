"""Answers: drawn from a model, scored by another, and made into what rollmill trains on.

All prompts have the same length, so a batch needs no padding before the answers; what is behind an
answer's end cannot influence what is before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rollmill.sample import Group, Sample, Segment, Status, float_array
from tiny_study.task import END, MAX_NEW_TOKENS, is_right, prompt_ids

_ROWS = 1024
_PLAIN = GenerationConfig(
    do_sample=True,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    max_new_tokens=MAX_NEW_TOKENS,
    eos_token_id=END,
    pad_token_id=END,
    return_dict_in_generate=True,
    output_logits=True,
)
"""Draws from the model's own distribution."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        prompt: its five digits.
        tokens: R sampled tokens, the end included when there is one.
        log_probs: of them under the model that drew them; None when nobody drew them.
        teacher_log_probs: of them under a teacher.
    """

    prompt: str
    tokens: list[int]
    log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None

    @property
    def is_right(self) -> bool:
        """Whether it is the sorted digits."""
        return is_right(self.prompt, self.tokens)

    def to_group(self, number: int) -> Group:
        """As a finished group of one sample."""
        known = self.log_probs
        segment = (
            Segment.from_data(self.tokens)
            if known is None
            else Segment.from_engine(self.tokens, known, 0)
        )
        teacher = self.teacher_log_probs
        sample = Sample(
            prompt_tokens=prompt_ids(self.prompt),  # type: ignore[arg-type]
            index=number,
            group_index=number,
            prompt=self.prompt,
            segments=[segment],
            status=Status.COMPLETED if self.tokens[-1] == END else Status.TRUNCATED,
            teacher_log_probs=None if teacher is None else float_array(teacher),
        )
        return Group(number, [sample])


def num_tokens(answers: Sequence[Answer]) -> int:
    """Answer tokens in all."""
    return sum(len(answer.tokens) for answer in answers)


def accuracy(answers: Sequence[Answer]) -> float:
    """Share of right answers."""
    return sum(answer.is_right for answer in answers) / len(answers)


def draw(model: Any, prompts: Sequence[str], seed: int) -> list[Answer]:
    """One answer to each prompt from the model's own distribution (temperature 1)."""
    answers = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), _ROWS):
            batch = prompts[start : start + _ROWS]
            tokens_BR, log_probs_BR = _draw(model, batch)
            for prompt, tokens, log_probs in zip(
                batch, tokens_BR.tolist(), log_probs_BR.tolist(), strict=True
            ):
                length = tokens.index(END) + 1 if END in tokens else len(tokens)
                answers.append(Answer(prompt, tokens[:length], log_probs[:length]))
    return answers


def _draw(model: Any, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs [B, R], whatever comes after the ends included."""
    ids = torch.tensor([prompt_ids(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=_PLAIN
    )
    logits_BRV = torch.stack(output.logits, dim=1)
    tokens_BR = output.sequences[:, ids.shape[1] :]
    log_probs_BRV = torch.log_softmax(logits_BRV, dim=-1)
    return tokens_BR, log_probs_BRV.gather(2, tokens_BR[..., None])[..., 0]


@torch.no_grad()
def scored(answers: Sequence[Answer], teacher: Any) -> list[Answer]:
    """The same answers with the teacher's log-probs of their tokens."""
    result = []
    for start in range(0, len(answers), _ROWS):
        batch = answers[start : start + _ROWS]
        rows = [[*prompt_ids(a.prompt), *a.tokens] for a in batch]
        width = max(map(len, rows))
        ids = torch.tensor([row + [END] * (width - len(row)) for row in rows])
        logits = teacher(input_ids=ids, use_cache=False).logits[:, :-1]
        scores = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        for answer, row, values in zip(batch, rows, scores.tolist(), strict=True):
            length = len(row)
            kept = values[length - len(answer.tokens) - 1 : length - 1]
            result.append(replace(answer, teacher_log_probs=kept))
    return result


@dataclass
class Epochs:
    """Batches out of a list, a new permutation every epoch; a batch may span two of them."""

    items: Sequence[Any]
    seed: int
    _waiting: list[int] = field(default_factory=list)
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def take(self, count: int) -> list[Any]:
        """The next items."""
        return list(self._indices(count))

    def _indices(self, count: int) -> Iterator[Any]:
        for _ in range(count):
            if not self._waiting:
                order = torch.randperm(len(self.items), generator=self._generator)
                self._waiting = order.tolist()
            yield self.items[self._waiting.pop()]
