"""The weighted sum of several rewards. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.config.reward import RewardConfig
from rollmill.rewards.outcome import Outcome, OutcomeKind, number_of
from rollmill.sample import Reward

TOTAL = "total"


def combine(outcomes: Mapping[str, Outcome], config: RewardConfig) -> Outcome:
    """One outcome from those of the parts in `config.weights`.

    The reward is a mapping: each part under its name, and their weighted sum as `total`. A part
    without a value counts as the number that the configuration gives its kind. When no part has a
    value the whole has that kind too; an error without `error_reward` makes the whole an error.
    """
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    details = "; ".join(
        f"{name}: {outcome.kind.value}{f' ({outcome.detail})' if outcome.detail else ''}"
        for name, outcome in outcomes.items()
        if outcome.kind is not OutcomeKind.VALUE or outcome.detail
    )
    kinds = {outcome.kind for outcome in outcomes.values()}
    numbers = {
        name: _scalar(number_of(outcome, config, name)) for name, outcome in outcomes.items()
    }
    if None in numbers.values():
        return Outcome.error(details or "a part gave several numbers, none called score", seconds)
    extracted = next((o.extracted for o in outcomes.values() if o.extracted is not None), None)
    if len(kinds) == 1 and OutcomeKind.VALUE not in kinds:
        return Outcome(kinds.pop(), None, extracted, details, seconds)
    parts = {name: number for name, number in numbers.items() if number is not None}
    total = sum(config.weights[name] * number for name, number in parts.items())
    return Outcome(OutcomeKind.VALUE, {**parts, TOTAL: total}, extracted, details or None, seconds)


def _scalar(reward: Reward | None) -> float | None:
    if not isinstance(reward, Mapping):
        return reward
    if len(reward) == 1:
        return next(iter(reward.values()))
    return reward.get("score", reward.get(TOTAL))
