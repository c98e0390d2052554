"""Filters and the order in which unfinished groups come back."""

import numpy as np

from rollmill.sample import attempt_rewards


def some_right_some_wrong(group):
    """`rollout.filters.dynamic`: keeps groups with right and wrong answers."""
    share = float(np.mean([reward > 0 for reward in attempt_rewards(group)]))
    if share == 0:
        return False, "never_right"
    return (False, "always_right") if share == 1 else True


def hardest_first(groups):
    """`rollout.filters.over_sampling`: ranks groups, lowest mean reward first.

    With `on_failed_group: keep` a group may hold samples that FAILED and have no reward.
    """

    def mean(group):
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        return float(np.mean(rewards)) if rewards else 0.0

    return sorted(groups, key=mean)


def longest_first(waiting, n):
    """`rollout.hooks.buffer_policy`: unfinished groups with most tokens come back first."""
    return sorted(waiting, key=lambda group: -group.num_response_tokens)[:n]
