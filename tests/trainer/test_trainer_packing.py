"""Packing: complete, within capacity, nearly full, and each sequence by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.trainer.layout import TokenSequence, plan_packed, plan_padded
from rollmill.trainer.packing import first_fit_decreasing, pack_rows


def test_first_fit_decreasing_by_hand() -> None:
    # 7 → bin 0; 5 → bin 1; 5 → bin 1 (full); 3 → bin 0 (full); 12 is too long: alone; 1 → bin 3.
    assert first_fit_decreasing([3, 7, 5, 12, 5, 1], 10) == [[3], [1, 0], [2, 4], [5]]
    assert first_fit_decreasing([], 10) == []


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 50))
def test_every_item_is_in_one_bin_and_bins_are_as_few_as_promised(
    lengths: list[int], capacity: int
) -> None:
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    for items in bins:
        assert sum(lengths[i] for i in items) <= capacity or len(items) == 1
    fitting = [length for length in lengths if length <= capacity]
    loads = [sum(lengths[i] for i in items) for items in bins]
    if len(fitting) == len(lengths) and sum(lengths):
        fewest = math.ceil(sum(lengths) / capacity)
        assert fewest <= len(bins) <= max(1, 2 * fewest)
        assert sum(load <= capacity / 2 for load in loads) <= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.8])
def test_log_normal_lengths_fill_rows_to_97_percent(seed: int, sigma: float) -> None:
    rng = np.random.default_rng(seed)
    capacity = 2048
    drawn = rng.lognormal(np.log(160) - sigma**2 / 2, sigma, 512).astype(int)
    lengths = np.clip(drawn, 1, capacity).tolist()
    bins = first_fit_decreasing(lengths, capacity)
    assert sum(lengths) / (len(bins) * capacity) >= 0.97


def test_a_row_is_its_sequences_each_seeing_itself_only() -> None:
    (row,) = pack_rows([4, 7], [np.array([8, 9]), np.array([5, 6, 7])], 6)
    assert row.members == (7, 4)
    assert row.tokens.tolist() == [5, 6, 7, 8, 9]
    assert row.depths.tolist() == [0, 1, 2, 0, 1]
    assert row.visibility().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_packed_micro_batches_have_less_padding_than_padded_ones() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(160) - 0.125, 0.5, 64).astype(int) + 2
    items = [TokenSequence(np.ones(n, np.int64), np.arange(1, n)) for n in lengths]

    def full(plan_of: object) -> float:
        plan = plan_of(items, 2048)  # type: ignore[operator]
        return sum(b.num_tokens for b in plan) / sum(b.num_positions for b in plan)

    assert full(plan_packed) > 0.97 > full(plan_padded)
