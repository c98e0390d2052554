"""What a plan is computed from: figures that were stated, or measured on a run.

Units are tokens and seconds. An engine takes `a + b·c` seconds for one token of each of c answers
that it decodes together; the two rates that people know (alone, and with all places taken) are two
points of that line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from rollmill.errors import ConfigError

REQUIRED = (
    "response_tokens",
    "tokens_per_second",
    "tokens_per_second_alone",
    "train_tokens_per_second",
    "sync_s",
)
"""What must be stated when no run was measured."""
SMALLEST = 1e-9
RANGES = {
    "response_tokens": (1.0, float("inf")),
    "tokens_per_second": (SMALLEST, float("inf")),
    "tokens_per_second_alone": (SMALLEST, float("inf")),
    "train_tokens_per_second": (SMALLEST, float("inf")),
    "prefill_tokens_per_second": (SMALLEST, float("inf")),
    "accepted_share": (0.01, 1.0),
    "contention": (1.0, float("inf")),
}
"""Lowest and highest value of what may not be any number from 0."""


@dataclass(frozen=True)
class Assumptions:
    """One set of figures.

    Attributes:
        response_tokens: mean length of an answer.
        tokens_per_second: one engine's, with all its places taken.
        tokens_per_second_alone: one engine's, with a single answer.
        train_tokens_per_second: response tokens that the trainer learns from, per second.
        sync_s: moving new weights to the engines; they hold meanwhile.
        response_sigma: spread of lengths: standard deviation of their logarithm.
        prompt_tokens: mean length of a prompt; each is computed once per group.
        prefill_tokens_per_second: one engine's, for prompts; infinite when the rates above have
            it in them.
        grade_s: judging one answer, on one worker.
        train_fixed_s: seconds of a training step that do not depend on its tokens.
        other_s: seconds of a step that are neither rollout, training nor sync.
        accepted_share: groups that the filters keep.
        contention: how many times as long engine and trainer take while both work; 1 for machines
            of their own.
        lengths: answers' lengths by group, as measured; empty draws them log-normal.
    """

    response_tokens: float
    tokens_per_second: float
    tokens_per_second_alone: float
    train_tokens_per_second: float
    sync_s: float
    response_sigma: float = 0.6
    prompt_tokens: float = 100.0
    prefill_tokens_per_second: float = float("inf")
    grade_s: float = 0.001
    train_fixed_s: float = 0.0
    other_s: float = 0.0
    accepted_share: float = 1.0
    contention: float = 1.0
    lengths: tuple[tuple[int, ...], ...] = ()

    def decode_line(self, places: int) -> tuple[float, float]:
        """(a, b): seconds of one decoding step of c answers are a + b·c, up to `places` answers."""
        alone = 1.0 / self.tokens_per_second_alone
        if places == 1:
            return alone, 0.0
        full = places / self.tokens_per_second
        per_answer = max(0.0, (full - alone) / (places - 1))
        return max(0.0, alone - per_answer), per_answer

    def train_seconds(self, num_tokens: int) -> float:
        """Seconds of a training step on so many response tokens."""
        return self.train_fixed_s + num_tokens / self.train_tokens_per_second

    def group_lengths(
        self, rng: np.random.Generator, num_answers: int, max_tokens: int
    ) -> list[int]:
        """Lengths of the answers to one prompt, at most `max_tokens` each.

        Measured groups are drawn whole, since hard prompts have long answers all together.
        """
        if self.lengths:
            group = self.lengths[int(rng.integers(len(self.lengths)))]
            whole = [
                group[n] if n < len(group) else int(rng.choice(group)) for n in range(num_answers)
            ]
        else:
            mu = np.log(self.response_tokens) - self.response_sigma**2 / 2
            whole = (
                np.rint(rng.lognormal(mu, self.response_sigma, num_answers)).astype(int).tolist()
            )
        return [min(max(1, tokens), max_tokens) for tokens in whole]


def stated(texts: Sequence[str], measured: Assumptions | None = None) -> Assumptions:
    """The assumptions that `name=value` texts state, over the measured ones when there are any.

    Raises:
        ConfigError: an unknown name, a value that is no positive number, or something is missing.
    """
    values = dict(_parse(text) for text in texts)
    if measured is not None:
        if "response_tokens" in values:
            factor = values["response_tokens"] / measured.response_tokens
            scaled = tuple(tuple(max(1, round(n * factor)) for n in g) for g in measured.lengths)
            measured = replace(measured, lengths=scaled)
        return replace(measured, **values)  # type: ignore[arg-type]
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        raise ConfigError(
            "a plan needs to know how fast things are",
            where="--assume",
            expected=f"values of {', '.join(missing)}",
            fix="state them (--assume response_tokens=500 …), or give a run: --trace RUN",
        )
    return Assumptions(**values)  # type: ignore[arg-type]


def names() -> list[str]:
    """What can be stated."""
    return [field.name for field in fields(Assumptions) if field.name != "lengths"]


def as_mapping(assumptions: Assumptions) -> Mapping[str, float]:
    """The figures by name."""
    return {name: getattr(assumptions, name) for name in names()}


def _parse(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in names():
        raise ConfigError(
            "there is no such assumption",
            where="--assume",
            expected=f"name=value with one of {', '.join(names())}",
            found=text,
            fix="docs/before_a_run.md explains each of them",
        )
    low, high = RANGES.get(name, (0.0, float("inf")))
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise ConfigError(
            "an assumption is out of range",
            where=f"--assume {name}",
            expected=f"a number from {low:g} to {high:g}",
            found=value or "nothing",
            fix="give a number in that range",
        )
    return name, number
