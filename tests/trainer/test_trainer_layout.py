"""Micro-batches: complete, within budget, and trees that are the sequences they hold."""

from __future__ import annotations

import functools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.trainer.layout import (
    MicroBatch,
    TokenSequence,
    choose_plan,
    plan_packed,
    plan_padded,
    plan_trees,
)
from rollmill.trainer.prefix_tree import split_into_trees


def sequence(tokens: list[int], first_target: int = 1, family: int = 0) -> TokenSequence:
    return TokenSequence(
        np.array(tokens), np.arange(first_target, max(len(tokens), first_target)), family
    )


@st.composite
def sequences(draw: st.DrawFn) -> TokenSequence:
    tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    wanted = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    targets = [position for position in range(1, len(tokens)) if wanted[position]]
    return TokenSequence(np.array(tokens), np.array(targets, np.int64), draw(st.integers(0, 1)))


def contexts(batch: MicroBatch, plan_input: list[TokenSequence]) -> list[tuple[int, ...]]:
    """For each scored token in output order: the tokens its row sees by position, and itself."""
    width = batch.input_ids.shape[1]
    found = []
    for output in batch.outputs:
        row, position = divmod(int(batch.rows[output]), width)
        if batch.boundaries is not None:
            assert row == 0
            assert batch.mask is None
            begin = batch.boundaries[batch.boundaries <= position].max()
            visible = (np.arange(width) >= begin) & (np.arange(width) <= position)
        elif batch.mask is None or batch.mask.ndim == 2:
            visible = np.arange(width) <= position
        else:
            visible = batch.mask[row, 0, position]
        order = np.argsort(batch.position_ids[row][visible])
        depths = batch.position_ids[row][visible][order]
        assert depths.tolist() == list(range(len(depths)))
        seen = batch.input_ids[row][visible][order]
        found.append((*seen.tolist(), int(batch.target_ids[output])))
    return found


plan_packed_without_mask = functools.partial(plan_packed, needs_mask=False)


@pytest.mark.parametrize(
    "planner", [plan_padded, plan_trees, plan_packed, plan_packed_without_mask]
)
@given(items=st.lists(sequences(), max_size=8), budget=st.integers(1, 40))
def test_every_wanted_token_is_scored_once_after_exactly_its_own_beginning(
    planner: object, items: list[TokenSequence], budget: int
) -> None:
    plan = planner(items, budget)  # type: ignore[operator]
    members = [member for batch in plan for member in batch.members]
    assert sorted(members) == [n for n, item in enumerate(items) if len(item.targets)]
    for batch in plan:
        expected = [
            tuple(items[member].tokens[: target + 1].tolist())
            for member in batch.members
            for target in items[member].targets
        ]
        assert contexts(batch, items) == expected
        longest = max(items[member].num_inputs for member in batch.members)
        assert batch.num_positions <= max(budget, longest)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_tree_has_one_node_per_distinct_beginning(items: list[list[int]]) -> None:
    (tree,) = split_into_trees(range(len(items)), [np.array(item) for item in items], 1000)
    beginnings = {tuple(item[: end + 1]) for item in items for end in range(len(item))}
    assert tree.size == len(beginnings)
    for member, path in zip(tree.members, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == items[member]
        assert np.flatnonzero(tree.visibility()[path[-1]]).tolist() == sorted(path.tolist())


def test_a_tree_by_hand() -> None:
    #  5 ─ 6 ─ 7 ─ 8       nodes 0 1 2 3
    #       └─ 9           node 4
    items = [np.array([5, 6, 9]), np.array([5, 6, 7, 8])]
    (tree,) = split_into_trees([0, 1], items, 100)
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9]
    assert tree.depths.tolist() == [0, 1, 2, 3, 2]
    assert tree.members == (1, 0)
    assert tree.visibility().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_families_share_nothing_and_tokens_after_the_last_wanted_one_are_left_out() -> None:
    items = [sequence([5, 6, 7], family=0), sequence([5, 6, 7], family=1)]
    (batch,) = plan_trees(items, 100)
    assert batch.input_ids.tolist() == [[5, 6], [5, 6]]


def test_shared_answers_choose_trees_and_unrelated_ones_rows() -> None:
    prompt = list(range(30))
    shared = [sequence([*prompt, answer, 1], 30) for answer in range(8)]
    unrelated = [sequence([answer] * 20, family=answer) for answer in range(8)]
    shape = {"width": 16, "layer_parameters": 10_000}
    assert choose_plan(shared, 1000, **shape)[0].mask.ndim == 4
    assert choose_plan(unrelated, 1000, **shape)[0].mask is None


def test_no_mask_is_held_while_plans_are_compared() -> None:
    """Ten trees of 2 × 800 nodes: their masks are 26 MB, what a plan needs is less than 4."""
    items = [
        sequence([family, *[answer] * 800], 2, family) for family in range(10) for answer in (1, 2)
    ]
    tracemalloc.start()
    plan = choose_plan(items, 2000, width=16, layer_parameters=10_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6
    assert sum(len(batch.members) for batch in plan) == 20


def test_a_packed_row_without_mask_is_as_long_as_its_sequences() -> None:
    items = [sequence([1] * length) for length in (3, 6, 4)]
    (batch,) = plan_packed(items, 100, needs_mask=False)
    assert batch.members == (1, 2, 0)
    assert batch.boundaries is not None
    assert batch.boundaries.tolist() == [0, 5, 8, 10]
    assert batch.num_tokens == batch.num_positions == 10
    assert batch.attention_cells == 15 + 6 + 3


def test_rows_of_similar_length_go_together() -> None:
    items = [sequence([1] * length) for length in (3, 9, 3, 9)]
    plan = plan_padded(items, 16)
    assert [batch.members for batch in plan] == [(1, 3), (0, 2)]
    assert all(batch.num_tokens == batch.num_positions for batch in plan)
