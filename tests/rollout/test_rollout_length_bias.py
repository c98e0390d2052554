"""Short answers that crowd out long ones show in the figure for it."""

from rollmill.rollout.length_bias import LengthBias
from rollmill.testing import make_group


def test_no_answers_no_bias() -> None:
    assert LengthBias().value == 1.0


def test_a_batch_of_the_quickest_is_biased_until_the_slow_ones_are_trained_on() -> None:
    lengths = [40, 10, 30, 20]
    groups = [make_group(index, (0.0, 1.0), length=n) for index, n in enumerate(lengths)]
    bias = LengthBias()
    for group in groups:
        bias.issued(group.group_index)
    for group in (groups[1], groups[3]):
        bias.ended(group)
    bias.trained([groups[1], groups[3]])
    assert bias.value == 1.0, "nothing is known yet of the first prompt issued"
    bias.ended(groups[0])
    assert bias.value == 15 / 25, "trained 10 and 20; issued 40 and 10, and 30 has not ended"
    bias.ended(groups[2])
    assert bias.value == 15 / 25, "trained 10 and 20; issued 40, 10, 30, 20"
    bias.trained([groups[0], groups[2]])
    assert bias.value == 1.0


def test_long_answers_that_are_rejected_are_missed() -> None:
    bias = LengthBias()
    for index, length in enumerate((10, 30)):
        bias.issued(index)
        bias.ended(make_group(index, (0.0, 1.0), length=length))
    bias.trained([make_group(0, (0.0, 1.0), length=10)])
    assert bias.value == 0.5
