"""What a scripted engine says: answers and faults as a pure function of the request.

A `Script` decides how long each answer is, which tokens it has, how long a token takes, and which
requests meet which fault. All of it follows from the seed and the request alone, so a run with
the same script and the same requests sees the same answers whatever the order of arrival.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class Call:
    """One /generate request as it arrived; `nth` counts them from 0."""

    nth: int
    rid: str
    input_ids: tuple[int, ...]
    sampling: dict[str, Any]
    routing_key: str | None = None

    @property
    def name(self) -> str:
        """The request id as the client's caller gave it, without the marks of the wire."""
        return re.split("[;~|]", self.rid)[0]

    @property
    def max_new_tokens(self) -> int:
        return int(self.sampling.get("max_new_tokens", 128))


class FaultKind(StrEnum):
    HTTP = "http"  # answer `status` instead of generating
    HANG = "hang"  # never answer, deaf to aborts
    CUT = "cut"  # close the connection, after `after` streamed tokens or without any answer
    STALL = "stall"  # write `after` tokens, then wait for an abort
    STREAM_ERROR = "stream_error"  # after `after` streamed tokens, an error of `status`
    MALFORMED_JSON = "malformed_json"
    MISSING_FIELD = "missing_field"  # no meta_info
    MISSING_LOG_PROBS = "missing_log_probs"
    LENGTH_MISMATCH = "length_mismatch"  # one log-prob short
    POSITIVE_LOG_PROB = "positive_log_prob"
    WRONG_VERSION = "wrong_version"
    BAD_SPANS = "bad_spans"  # a gap
    EMPTY_ABORT = "empty_abort"  # abort at once with no token
    TOO_MANY_TOKENS = "too_many_tokens"
    UNKNOWN_FINISH = "unknown_finish"


@dataclass(frozen=True)
class Fault:
    """A fault and the requests that meet it: any of `nth`, `rid` (regex on the caller's id),
    `rate` (seeded by the id on the wire, so a retry draws again). None of them given: every one.
    `times` limits how often it happens."""

    kind: FaultKind | str
    nth: tuple[int, ...] = ()
    rid: str | None = None
    rate: float | None = None
    times: int | None = None
    status: int = 500
    after: int = 0

    def matches(self, call: Call, seed: int) -> bool:
        if not self.nth and self.rid is None and self.rate is None:
            return True
        return (
            call.nth in self.nth
            or (self.rid is not None and re.search(self.rid, call.name) is not None)
            or (self.rate is not None and _unit(seed, self.kind, call.rid) < self.rate)
        )


class Pieces(StrEnum):
    """How a streamed answer is cut."""

    EMBEDDED = "embedded"  # what is new, when that is asked for, with the versions so far
    CUMULATIVE = "cumulative"  # everything so far: SGLang
    INCREMENTAL = "incremental"  # what is new: SGLang with a flag


@dataclass(frozen=True)
class LogNormal:
    """Answer lengths exp(N(ln median, sigma)), from 1 to cap: the long tail of real rollouts."""

    median: float = 64.0
    sigma: float = 1.0
    cap: int = 16384

    def __call__(self, draw: random.Random) -> int:
        return max(1, min(self.cap, round(draw.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True)
class Uniform:
    low: int = 1
    high: int = 16

    def __call__(self, draw: random.Random) -> int:
        return draw.randint(self.low, self.high)


def words(token_ids: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in token_ids)


def log_prob_of(token: int) -> float:
    """Every token has one log-prob, so tests can work it out: -0.01 to -0.97."""
    return -((token % 97) + 1) / 100.0


@dataclass(frozen=True)
class Script:
    """Everything a scripted engine does.

    `length`: a number, a distribution, or a function of the call; the last token of an answer
    shorter than max_new_tokens is `eos_id`. `tokens`: overrides the tokens (without the eos).
    `pieces`: how streamed answers are cut.
    `token_s`: seconds per token; 0 answers at once. `max_running`: more requests queue.
    """

    seed: int = 0
    length: int | LogNormal | Uniform | Callable[[Call], int] = 8
    tokens: Callable[[Call, int], Sequence[int]] | None = None
    render: Callable[[Sequence[int]], str] = words
    token_s: float = 0.0
    vocab_size: int = 1000
    eos_id: int = 2
    max_running: int | None = None
    version: str = "0"
    pieces: Pieces | str = Pieces.EMBEDDED
    faults: tuple[Fault, ...] = field(default=())

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Script:
        """A script from a JSON object; `length` is a number or {"kind": "lognormal"|"uniform"}."""
        fields = dict(raw)
        length = fields.get("length")
        if isinstance(length, dict):
            kinds = {"lognormal": LogNormal, "uniform": Uniform}
            fields["length"] = kinds[length.pop("kind")](**length)
        faults = [{**fault, "nth": tuple(fault.get("nth", ()))} for fault in raw.get("faults", ())]
        fields["faults"] = tuple(Fault(**fault) for fault in faults)
        return cls(**fields)

    def with_faults(self, *faults: Fault) -> Script:
        return replace(self, faults=self.faults + faults)

    def planned_length(self, call: Call) -> int:
        if isinstance(self.length, int):
            return self.length
        if isinstance(self.length, LogNormal | Uniform):
            return self.length(self._draw("length", call))
        return self.length(call)

    def answer(self, call: Call) -> tuple[list[int], bool]:
        """The tokens this call will write, and whether it stops by itself (not by length)."""
        planned = self.planned_length(call)
        limit = call.max_new_tokens
        stops = planned <= limit and not call.sampling.get("ignore_eos", False)
        if self.tokens is not None:
            written = list(self.tokens(call, min(planned, limit)))[:limit]
            return written, stops
        draw = self._draw("tokens", call)
        number = planned if stops else limit
        written = [draw.randrange(self.eos_id + 1, self.vocab_size) for _ in range(number)]
        if stops and written:
            written[-1] = self.eos_id
        return written, stops

    def _draw(self, purpose: str, call: Call) -> random.Random:
        """A generator for this request: by its sampling seed when it has one, else by its id."""
        who = call.sampling.get("sampling_seed", call.name)
        return random.Random(_digest(self.seed, purpose, who, call.input_ids))


def _digest(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _unit(*parts: Any) -> float:
    return _digest(*parts) / 2**64
