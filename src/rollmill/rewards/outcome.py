"""What became of judging one answer.

Four things can happen, and they are different things: a value was given, no answer was found
(`invalid`), the time limit passed (`timeout`), or judging itself went wrong (`error`). They stay
different in the record and the metrics; only `apply_outcome` maps them to numbers, as the
configuration says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollmill.config.reward import RewardConfig
from rollmill.sample import Reward, Sample

MAX_DETAIL_CHARS = 2000
"""Longest `extracted` and `detail` kept; graders see whole answers, records need not."""

PRIMARY_PARTS = ("total", "score")
"""Parts that stand for a mapping when no `reward_key` is set, in order of preference."""


class OutcomeKind(StrEnum):
    """How judging ended."""

    VALUE = "value"
    INVALID = "invalid"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The judgement of one answer.

    Attributes:
        kind: how judging ended.
        reward: the number or named parts; None unless `kind` is VALUE.
        extracted: what was taken as the answer, for people; None when nothing was found.
        detail: why, for people.
        seconds: time the grader took, waiting in queues left out.
    """

    kind: OutcomeKind
    reward: Reward | None = None
    extracted: str | None = None
    detail: str | None = None
    seconds: float = 0.0

    @classmethod
    def error(cls, detail: str, seconds: float = 0.0) -> Outcome:
        """Judging went wrong."""
        return cls(OutcomeKind.ERROR, detail=detail[:MAX_DETAIL_CHARS], seconds=seconds)


def worst_reward(name: str | None) -> float:
    """What a wrong answer gets from a reward: -1 from `dapo`, 0 from the others.

    An answer without a result must not be better off than a wrong one.
    """
    return -1.0 if name is not None and name.removeprefix("boxed_") == "dapo" else 0.0


def _worst_of(config: RewardConfig, name: str | None) -> float:
    """What a wrong answer gets; from the weighted sum of `weights` when no reward is named."""
    if name is None:
        return sum(weight * worst_reward(part) for part, weight in config.weights.items())
    return worst_reward(name)


def number_of(outcome: Outcome, config: RewardConfig, name: str | None) -> Reward | None:
    """The reward that the configuration gives an outcome of the reward `name`.

    `name` None is the run's weighted sum. None asks for the sample to fail.
    """
    match outcome.kind:
        case OutcomeKind.VALUE:
            return outcome.reward
        case OutcomeKind.INVALID:
            given = config.invalid_reward
            return _worst_of(config, name) if given is None else given
        case OutcomeKind.TIMEOUT:
            given = config.timeout_reward
            return _worst_of(config, name) if given is None else given
        case OutcomeKind.ERROR:
            return config.error_reward


def apply_outcome(sample: Sample, outcome: Outcome, config: RewardConfig) -> None:
    """Write the outcome on the sample; an error without `error_reward` makes it FAILED.

    A mapping stays a mapping when `reward_key` names one of its parts; without a `reward_key` it
    is reduced to its `total` or `score` part and the parts go to `metadata["reward_parts"]`.
    """
    sample.reward_outcome = outcome.kind.value
    sample.reward_detail = outcome.detail if outcome.extracted is None else _shown(outcome)
    name = sample.reward_function or sample.metadata.get("reward_type") or config.type
    reward = number_of(outcome, config, None if name is None else str(name))
    if reward is None:
        sample.reward = None
        sample.fail(f"reward: {outcome.detail or 'grading failed'}")
        return
    if not isinstance(reward, dict):
        sample.reward = reward
        return
    if config.reward_key is None:
        primary = next((part for part in PRIMARY_PARTS if part in reward), None)
        if primary is not None:
            sample.metadata = {**sample.metadata, "reward_parts": dict(reward)}
            sample.reward = reward[primary]
            return
    elif config.reward_key in reward:
        sample.reward = dict(reward)
        return
    sample.reward = None
    sample.reward_outcome = OutcomeKind.ERROR.value
    sample.fail(
        f"reward: expected reward.reward_key to name a part of the reward, found "
        f"{config.reward_key!r} and the parts {sorted(reward)}"
    )


def _shown(outcome: Outcome) -> str:
    extracted = f"answer: {outcome.extracted}"
    return f"{extracted} ({outcome.detail})" if outcome.detail else extracted
