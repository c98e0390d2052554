"""Packing: many sequences laid end to end in rows, so that hardly anything is padding. Pure numpy.

A packed row is a prefix tree with one root per sequence: nothing is shared, positions begin anew
with each sequence, and every position sees the beginning of its own sequence only. So the layout
needs no arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollmill.trainer.prefix_tree import PrefixTree


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Items by bin: the longest first, each into the first bin that has room.

    Needs at most 11/9 of the fewest possible bins and one more (Johnson 1973); on log-normal
    lengths with a capacity of several means, all bins but the last are more than 97 % full.

    Args:
        lengths: of the items, at least 0.
        capacity: most that a bin holds; an item that is longer has a bin to itself.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fitting = (number for number, left in enumerate(room) if left >= lengths[item])
        chosen = next(fitting, None)
        if chosen is None:
            bins.append([item])
            room.append(capacity - lengths[item])
        else:
            bins[chosen].append(item)
            room[chosen] -= lengths[item]
    return bins


def pack_rows(
    members: Sequence[int], sequences: Sequence[npt.NDArray[np.integer]], capacity: int
) -> list[PrefixTree]:
    """Rows of at most `capacity` tokens (a longer sequence alone) that hold every sequence once."""
    bins = first_fit_decreasing([len(sequence) for sequence in sequences], capacity)
    return [_row([members[n] for n in items], [sequences[n] for n in items]) for items in bins]


def _row(members: list[int], sequences: list[npt.NDArray[np.integer]]) -> PrefixTree:
    ends = np.cumsum([len(sequence) for sequence in sequences])
    return PrefixTree(
        members=tuple(members),
        tokens=np.concatenate(sequences).astype(np.int64),
        depths=np.concatenate([np.arange(len(sequence)) for sequence in sequences]),
        paths=tuple(
            np.arange(end - len(sequence), end)
            for end, sequence in zip(ends, sequences, strict=True)
        ),
        shared=(0,) * len(members),
    )
