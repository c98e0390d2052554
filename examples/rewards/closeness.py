"""A reward of your own: the closer an estimate, the more it is worth."""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def closeness(sample):
    """1 for the exact number, 0 from a relative error of 1 on; None when there is no number.

    None is not the same as 0: the answer is counted as `invalid`, and `reward.invalid_reward` says
    what it is worth.
    """
    numbers = NUMBER.findall(sample.response.replace(",", ""))
    if not numbers:
        return None
    gold = float(sample.label)
    error = abs(float(numbers[-1]) - gold) / max(abs(gold), 1.0)
    return max(0.0, 1.0 - error)
