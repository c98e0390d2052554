"""A request that goes on where a lost engine left it. Pure.

The tokens that arrived become part of the context, and the rest of the budget is asked for. With a
`sampling_seed` the random numbers go on too, so that the answer is the one that the first engine
would have given (up to the rounding of logits): the embedded engine is told how many tokens were
written; SGLang counts positions from the start of the context.

Some rules look back at what was written: stop strings may lie across the cut, penalties count
tokens, grammars have a state. An engine that took the tokens for context would apply them
wrongly, so requests with such rules start afresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollmill.engine.types import FinishReason, GenerateResult
from rollmill.sample import IntArray, int_array

LOOKS_BACK: Mapping[str, object] = {
    "stop": None,
    "stop_regex": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "choice": None,
    "custom_params": None,
    "watermark": None,
    "beam_width": None,
}
"""Sampling parameters that depend on the tokens written before, and the value that is off."""


@dataclass
class Unfinished:
    """A request and what was written for it so far.

    Args:
        input_ids: the request's context.
        sampling: its sampling parameters.

    Attributes:
        written: the tokens so far, as an aborted answer; one without tokens at first.
    """

    input_ids: IntArray
    sampling: Mapping[str, Any]
    written: GenerateResult = field(default_factory=GenerateResult.aborted_before_start)

    @property
    def can_go_on(self) -> bool:
        """Whether tokens that were written may be kept."""
        return all(
            not value or name not in LOOKS_BACK or value == LOOKS_BACK[name]
            for name, value in self.sampling.items()
        )

    @property
    def num_left(self) -> int:
        """Tokens that may still be written."""
        return int(self.sampling["max_new_tokens"]) - self.written.num_tokens

    @property
    def cost(self) -> int:
        """Tokens of context plus the most that may be written; the same however often it is cut."""
        return len(self.input_ids) + int(self.sampling["max_new_tokens"])

    @property
    def num_before(self) -> int:
        """Tokens written so far whose random numbers are to be followed; 0 without a seed."""
        return self.written.num_tokens if self.sampling.get("sampling_seed") is not None else 0

    def context(self) -> IntArray:
        """What an engine must read to go on."""
        return int_array(np.concatenate([self.input_ids, self.written.token_ids]))

    def sampling_left(self) -> dict[str, Any]:
        """The sampling parameters of what is left."""
        params = {**self.sampling, "max_new_tokens": self.num_left}
        if params.get("min_new_tokens"):
            params["min_new_tokens"] = max(0, params["min_new_tokens"] - self.written.num_tokens)
        return params

    def keep(self, part: GenerateResult) -> None:
        """These tokens were written too, before their engine was lost."""
        self.written = self.written.followed_by(part)

    def finish(self, rest: GenerateResult) -> GenerateResult:
        """The whole answer, of which an engine has written the rest."""
        return self.written.followed_by(rest)

    def finish_at_limit(self) -> GenerateResult:
        """The whole answer, when the budget was used up by what was kept."""
        return replace(self.written, finish=FinishReason.LENGTH)
