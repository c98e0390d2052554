"""A reward over a group: all answers to one prompt are judged together."""

from collections import Counter


def distinct(samples):
    """A right answer is worth 1, shared by the answers of the group that say the same.

    `sample.label` is the list of all right answers ("Name a prime below 10"). A model that always
    gives the same right answer earns little; one reward per answer, in order.
    """
    answers = [sample.response.strip().lower() for sample in samples]
    how_often = Counter(answers)
    return [
        1.0 / how_often[answer] if answer in sample.label else 0.0
        for answer, sample in zip(answers, samples, strict=True)
    ]
