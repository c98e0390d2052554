"""Rows stay compact and keep their contents."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.embedded.kv import KVStore, LayerShape


def row_size(num_tokens: int) -> int:
    return 4 if num_tokens <= 4 else 8 if num_tokens <= 8 else 16


def store() -> KVStore:
    return KVStore(
        [LayerShape(1, 1, 1), LayerShape(2, 1, 3)],
        dtype=torch.float32,
        device=torch.device("cpu"),
        row_size=row_size,
        max_total_tokens=64,
    )


def contents(kv: KVStore, owner: int, length: int) -> list[float]:
    for pool in kv.pools():
        if owner in pool.owners:
            row = pool.owners.index(owner)
            last = pool.values[1][row, 1, :length, 2].tolist()
            assert pool.keys[0][row, 0, :length, 0].tolist() == last
            return list(last)
    raise AssertionError(f"{owner} has no row")


def write(kv: KVStore, owner: int, position: int, value: float) -> None:
    for pool in kv.pools():
        if owner in pool.owners:
            row = pool.owners.index(owner)
            for tensor in pool.keys + pool.values:
                tensor[row, :, position] = value


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_keep_their_tokens_through_moves(seed: int) -> None:
    rng = random.Random(seed)
    kv, expected = store(), {}
    for owner in range(60):
        event = rng.random()
        if event < 0.5 or not expected:
            kv.admit(owner, 1, None)
            expected[owner] = [float(owner)]
            write(kv, owner, 0, float(owner))
        elif event < 0.85:
            grown = rng.choice(list(expected))
            if len(expected[grown]) < 16:
                kv.ensure(grown, len(expected[grown]) + 1)
                write(kv, grown, len(expected[grown]), owner + 0.5)
                expected[grown].append(owner + 0.5)
        else:
            gone = rng.sample(list(expected), rng.randint(1, min(3, len(expected))))
            kv.drop_rows(gone)
            for one in gone:
                del expected[one]
        for one, tokens in expected.items():
            assert contents(kv, one, len(tokens)) == tokens
        assert sum(len(pool.owners) for pool in kv.pools()) == len(expected)


def test_a_row_starts_as_a_copy_of_its_block() -> None:
    kv = store()
    kv.new_block(0, 3, None, 0)
    for tensor in kv.blocks[0].keys + kv.blocks[0].values:
        tensor[:, 0], tensor[:, 1], tensor[:, 2] = 1.0, 2.0, 3.0
    kv.new_block(1, 5, 0, 2)
    assert kv.blocks[1].keys[0][0, :, 0].tolist() == [1.0, 2.0, 0.0, 0.0, 0.0]
    kv.admit("a", 4, 0)
    assert contents(kv, "a", 3) == [1.0, 2.0, 3.0]  # type: ignore[arg-type]
    kv.drop_blocks([0, 99])
    assert 0 not in kv.blocks


def test_unused_rows_are_given_back_when_room_is_short() -> None:
    kv = store()
    for owner in range(8):
        kv.admit(owner, 1, None)
    kv.drop_rows(list(range(8)))
    kv.admit("long", 9, None)
    small = next(pool for size, pool in kv._pools.items() if size == 4)
    assert small.capacity == 0


def test_bytes_per_token() -> None:
    assert store().bytes_per_token == (2 + 2 * 4) * 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_in_waiting_keep_within_the_limit(seed: int) -> None:
    """As long as what is used does: by a quarter of the largest pool, and one row, at most."""
    rng, kv, used = random.Random(seed), store(), {}
    for owner in range(40):
        size = rng.choice([4, 8, 16])
        if sum(used.values()) + size > 64:
            gone = rng.choice(list(used))
            kv.drop_rows([gone])
            del used[gone]
            continue
        kv.admit(owner, size, None)
        used[owner] = size
        allocated = [pool.size * pool.capacity for pool in kv._pools.values()]
        assert sum(allocated) <= 64 + max(16, max(allocated) // 5)


def test_a_long_row_takes_no_more_than_there_is() -> None:
    kv = store()
    kv.admit("long", 16, None)
    (pool,) = kv.pools()
    assert pool.capacity * pool.size == 64
