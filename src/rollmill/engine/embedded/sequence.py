"""One request in the engine, from its arrival to its last token.

The model's thread is the only writer; HTTP handlers read `output` and its companions, which only
grow, up to a length they were told of. All per-token lists have one entry per output token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from rollmill.engine.embedded.sampling import SamplingParams

TopLogprobs = list[tuple[float, int]]
"""Log-prob and token id, most likely first."""


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Which log-probs a request wants besides its tokens."""

    is_wanted: bool = False
    start_len: int = -1
    """First prompt position to report; -1 reports none."""
    num_top: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def wants_input(self) -> bool:
        """Whether log-probs of prompt tokens are wanted."""
        return self.is_wanted and self.start_len >= 0


@dataclass(slots=True)
class InputLogprobs:
    """Log-probs of the prompt's tokens from `start_len + 1` on, filled chunk by chunk."""

    chosen: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    by_id: list[TopLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class VersionSpan:
    """Output positions `[start, end)` written by one weight version."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens written for it so far.

    Invariant: while it decodes, the KV cache holds every token but the last; the last one is the
    input of the next step.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    logprobs: LogprobRequest
    seed: int
    arrival: int = 0
    output: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[TopLogprobs] = field(default_factory=list)
    output_by_id: list[TopLogprobs] = field(default_factory=list)
    input_logprobs: InputLogprobs = field(default_factory=InputLogprobs)
    has_input_logprobs: bool = False
    spans: list[VersionSpan] = field(default_factory=list)
    weight_version: str = ""
    """The version that wrote the last token, or that was loaded when it ended without one."""
    experts: list[torch.Tensor] | None = None
    """The experts of every position that was computed, in pieces `[positions, layers, top_k]`; None
    when they are not wanted."""
    experts_start: int = 0
    """First position whose experts are reported."""
    is_streamed: bool = False
    """Whether its reader wants to hear of tokens before the end."""
    sampling_offset: int = 0
    """Tokens at the end of the prompt that a request with the same seed wrote before: the random
    numbers go on after theirs."""
    cached_tokens: int | None = None
    num_retractions: int = 0
    has_stale_kv: bool = False
    """Whether part of its KV is of weights that have been replaced since."""
    finish_reason: dict[str, Any] | None = None
    stop_text: str | None = None
    """The stop string that ended it, when one did."""
    received_at: float = field(default_factory=time.time)
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt) + len(self.output)

    @property
    def has_news(self) -> bool:
        """Whether its reader wants to hear of the last token: the first one, and then every
        `stream_interval`-th."""
        return self.is_streamed and (len(self.output) - 1) % self.params.stream_interval == 0

    @property
    def sampling_position(self) -> int:
        """Which of its seed's random numbers chooses the next token."""
        return self.sampling_offset + len(self.output)

    @property
    def last_token(self) -> int:
        """The token that the next step feeds to the model."""
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def num_experts_noted(self) -> int:
        """Positions whose experts are known."""
        return sum(len(piece) for piece in self.experts or ())

    def context(self) -> list[int]:
        """The tokens that must be in the KV cache before the next decoding step."""
        return (self.prompt + self.output)[:-1]

    def reusable_prefix(self) -> int:
        """How many leading tokens may come from a cache: those whose log-probs and experts are not
        wanted, or known."""
        limit = self.num_tokens - 1
        if self.logprobs.wants_input and not self.has_input_logprobs:
            limit = min(self.logprobs.start_len, limit)
        return limit if self.experts is None else min(self.num_experts_noted, limit)

    def append(self, token: int, logprob: float, version: str) -> None:
        """Take the next token, written by weight version `version`."""
        position = len(self.output)
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(VersionSpan(version, position, position))
        # Log-prob first: a reader that sees the token also finds its log-prob.
        self.output_logprobs.append(logprob)
        self.output.append(token)
        self.spans[-1].end = position + 1
        self.weight_version = version
        if self.first_token_at is None:
            self.first_token_at = time.time()

    def finish(self, reason: dict[str, Any], version: str) -> None:
        """End it while `version` is loaded; the first reason stays."""
        if self.finish_reason is None:
            self.finished_at = time.time()
            if not self.output:
                self.weight_version = version
            self.finish_reason = reason
