"""The order of rows over epochs and mixtures."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.data.order import RowOrder

parts = st.lists(
    st.tuples(st.integers(1, 7), st.floats(0.05, 10, allow_nan=False)), min_size=1, max_size=4
)


def order_of(drawn, *, shuffle=True, seed=0):
    return RowOrder(
        [size for size, _ in drawn], [weight for _, weight in drawn], shuffle=shuffle, seed=seed
    )


def draw(order, n):
    return [order.next() for _ in range(n)]


def test_unshuffled_rows_keep_their_order_and_wrap():
    rows = [row for _, row in draw(order_of([(3, 1)], shuffle=False), 8)]
    assert rows == [0, 1, 2, 0, 1, 2, 0, 1]


@given(st.integers(1, 50), st.integers(-5, 2**70))
def test_each_epoch_is_a_permutation(size, seed):
    rows = [row for _, row in draw(order_of([(size, 1)], seed=seed), 3 * size)]
    for epoch in range(3):
        assert sorted(rows[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_differ_and_depend_on_the_seed_alone():
    first = draw(order_of([(20, 1)], seed=3), 40)
    assert first[:20] != first[20:]
    assert draw(order_of([(20, 1)], seed=3), 40) == first
    assert draw(order_of([(20, 1)], seed=4), 40) != first


@given(parts, st.integers(1, 200))
def test_parts_are_mixed_within_one_draw_of_their_share(drawn, n):
    counts = Counter(part for part, _ in draw(order_of(drawn), n))
    total = sum(weight for _, weight in drawn)
    for part, (_, weight) in enumerate(drawn):
        # Greedy largest deficit keeps every part under its due plus one; a part's lag is the
        # others' lead, hence the bound below.
        assert counts[part] <= n * weight / total + 1
        assert counts[part] >= n * weight / total - (len(drawn) - 1) - 1e-9


def test_golden_mixture_of_two_to_one():
    order = order_of([(5, 2.0), (5, 1.0)], shuffle=False)
    assert [part for part, _ in draw(order, 6)] == [0, 1, 0, 0, 1, 0]


@given(parts, st.integers(0, 60), st.booleans())
def test_a_saved_position_goes_on_as_if_nothing_had_happened(drawn, n, shuffle):
    order = order_of(drawn, shuffle=shuffle)
    draw(order, n)
    resumed = order_of(drawn, shuffle=shuffle)
    resumed.load_state_dict(order.state_dict())
    assert draw(resumed, 30) == draw(order, 30)


def test_other_weights_mix_anew_and_go_on_in_the_rows():
    order = order_of([(500, 1.0), (500, 1.0)], shuffle=False)
    draw(order, 400)
    other = order_of([(500, 3.0), (500, 1.0)], shuffle=False)
    other.load_state_dict(json.loads(json.dumps(order.state_dict())))
    drawn = draw(other, 40)
    assert Counter(part for part, _ in drawn) == {0: 30, 1: 10}
    assert min(row for _, row in drawn) == 200


def test_other_rows_begin_after_the_epochs_already_walked():
    order = order_of([(3, 1)])
    draw(order, 7)
    other = order_of([(4, 1)])
    other.start_after(order.state_dict())
    assert other.state_dict()["parts"] == [{"epoch": 3, "offset": 0, "num_given": 0}]
    assert sorted(row for _, row in draw(other, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("sizes", "weights"), [([], []), ([0], [1]), ([1], [0]), ([1, 2], [1])])
def test_sizes_and_weights_must_make_sense(sizes, weights):
    with pytest.raises(ValueError):
        RowOrder(sizes, weights, shuffle=True, seed=0)
