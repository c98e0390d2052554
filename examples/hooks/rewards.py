"""Reward functions: one answer at a time, or all answers to a prompt at once."""


def exact(sample):
    """`reward.function`: right or wrong; None says that there was no answer."""
    answer = sample.response.strip()
    return None if not answer else float(answer == sample.label)


def best_of_group(samples):
    """`reward.function` with `per_group: true`: only the shortest right answer gets the point."""
    right = [sample for sample in samples if sample.response.strip() == sample.label]
    best = min(right, key=lambda sample: sample.response_length, default=None)
    return [float(sample is best) for sample in samples]
