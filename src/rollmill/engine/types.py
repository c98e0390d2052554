"""What one generate call returned, as a checked value.

The invariant of `GenerateResult`: one log-prob per token, all finite and none above zero, and
version spans that cover the tokens exactly, in order. Parsing (`engine/parse.py`) builds nothing
else, so nobody downstream has to check again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal

import numpy as np

from rollmill.sample import EngineCounters, FloatArray, IntArray, Segment, float_array, int_array

HoldMode = Literal["abort", "retract", "in_place", "drain"]
"""What happens to running requests while weights change: they end, are queued again, stay as they
are, or are waited for."""


class FinishReason(StrEnum):
    """Why the engine stopped writing."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output positions `start` (included) to `end` (excluded), written by weights `version`."""

    version: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class GenerateResult:
    """One answer (or part of one, when aborted) of an engine.

    Attributes:
        token_ids: int32 [T], the tokens written; a matched stop token is among them.
        log_probs: float32 [T], natural log, at the sampling temperature.
        spans: which weight version wrote which positions; covers 0..T without gaps.
        finish: why writing stopped.
        text: the answer as text; empty when the engine has no tokenizer.
        counters: what this call cost; `num_calls` is 1 (0 when it never reached an engine).
        routed_experts: int32 [P + T - 1, layers, top_k], when asked for and the model has experts.
    """

    token_ids: IntArray
    log_probs: FloatArray
    spans: tuple[VersionSpan, ...]
    finish: FinishReason
    text: str = ""
    counters: EngineCounters = field(default_factory=EngineCounters)
    routed_experts: IntArray | None = None

    @classmethod
    def aborted_before_start(cls) -> GenerateResult:
        """The result of a request that was aborted before any engine saw it."""
        return cls(int_array([]), float_array([]), (), FinishReason.ABORT)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens written."""
        return len(self.token_ids)

    @property
    def is_aborted(self) -> bool:
        """True when the answer is unfinished because of an abort."""
        return self.finish is FinishReason.ABORT

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that wrote at least one token, in order of use."""
        return tuple(dict.fromkeys(span.version for span in self.spans if len(span)))

    def followed_by(self, rest: GenerateResult) -> GenerateResult:
        """One answer whose tokens are these and then those of `rest`, which went on from them.

        It counts as one call, with the tokens that both read. It has no text: that of `rest` is of
        its own tokens only.
        """
        if not self.num_tokens:
            return rest
        counters = EngineCounters(
            **{
                counter.name: getattr(self.counters, counter.name)
                + getattr(rest.counters, counter.name)
                for counter in fields(EngineCounters)
            }
        )
        counters.num_calls = 1
        return GenerateResult(
            token_ids=int_array(np.concatenate([self.token_ids, rest.token_ids])),
            log_probs=float_array(np.concatenate([self.log_probs, rest.log_probs])),
            spans=_joined(self.spans, rest.spans, self.num_tokens),
            finish=rest.finish,
            counters=counters,
            routed_experts=rest.routed_experts,
        )

    def to_segments(self) -> list[Segment]:
        """The tokens as trainable segments, one per weight version; none when T is 0."""
        return [
            Segment.from_engine(
                self.token_ids[span.start : span.end],
                self.log_probs[span.start : span.end],
                span.version,
            )
            for span in self.spans
            if len(span)
        ]


def _joined(
    first: tuple[VersionSpan, ...], rest: tuple[VersionSpan, ...], num_first: int
) -> tuple[VersionSpan, ...]:
    """The spans of both; one of a version that ends the first and begins the rest is one span."""
    moved = [VersionSpan(s.version, s.start + num_first, s.end + num_first) for s in rest]
    if first and moved and first[-1].version == moved[0].version:
        bridge = VersionSpan(first[-1].version, first[-1].start, moved[0].end)
        return (*first[:-1], bridge, *moved[1:])
    return (*first, *moved)
