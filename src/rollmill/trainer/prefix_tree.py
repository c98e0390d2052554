"""Prefix trees of token sequences: every distinct beginning is one node. Pure numpy.

Invariant: walking the path of a member through the tree reads exactly its tokens, and a node's
ancestors are exactly the beginning that it ends. A model that sees only ancestors computes for
each node what it would compute for that beginning alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrefixTree:
    """A tree in depth-first order: a parent comes before its children.

    Attributes:
        members: the caller's numbers of the sequences in it.
        tokens: int64 [N], the token of each node.
        depths: int64 [N], its distance from the beginning, from 0: its position id.
        paths: per member, int64 [L], the node of each of its tokens.
        shared: per member, how many of its first nodes were there before it.
    """

    members: tuple[int, ...]
    tokens: Ints
    depths: Ints
    paths: tuple[Ints, ...]
    shared: tuple[int, ...]

    @property
    def size(self) -> int:
        """N, the number of nodes."""
        return len(self.tokens)

    def visibility(self) -> npt.NDArray[np.bool_]:
        """bool [N, N]: True where the column is the row itself or an ancestor of it."""
        visible = np.zeros((self.size, self.size), np.bool_)
        for path, shared in zip(self.paths, self.shared, strict=True):
            new = path[shared:]
            visible[np.ix_(new, path[:shared])] = True
            visible[np.ix_(new, new)] = np.tri(len(new), dtype=np.bool_)
        return visible


def split_into_trees(
    members: Sequence[int], sequences: Sequence[npt.NDArray[np.integer]], budget: int
) -> list[PrefixTree]:
    """Trees of at most `budget` nodes (a longer sequence alone) that hold every sequence once.

    In lexicographic order the longest beginning that a sequence shares with *any* earlier one is
    the one it shares with its predecessor, so one pass over the sorted sequences builds the tree.
    """
    order = sorted(range(len(members)), key=lambda number: sequences[number].tolist())
    trees: list[PrefixTree] = []
    batch: list[int] = []
    shared: list[int] = []
    size = 0
    for number in order:
        common = _common_length(sequences[batch[-1]], sequences[number]) if batch else 0
        grown = size + len(sequences[number]) - common
        if batch and grown > budget:
            trees.append(_build(batch, shared, members, sequences))
            batch, shared, size, common = [], [], 0, 0
            grown = len(sequences[number])
        batch.append(number)
        shared.append(common)
        size = grown
    if batch:
        trees.append(_build(batch, shared, members, sequences))
    return trees


def _build(
    batch: list[int],
    shared: list[int],
    members: Sequence[int],
    sequences: Sequence[npt.NDArray[np.integer]],
) -> PrefixTree:
    tokens, depths, paths = [], [], []
    previous, size = np.zeros(0, np.int64), 0
    for number, common in zip(batch, shared, strict=True):
        length = len(sequences[number])
        path = np.concatenate([previous[:common], np.arange(size, size + length - common)])
        tokens.append(sequences[number][common:])
        depths.append(np.arange(common, length))
        paths.append(path)
        previous, size = path, size + length - common
    return PrefixTree(
        members=tuple(members[number] for number in batch),
        tokens=np.concatenate(tokens).astype(np.int64),
        depths=np.concatenate(depths),
        paths=tuple(paths),
        shared=tuple(shared),
    )


def _common_length(first: npt.NDArray[np.integer], second: npt.NDArray[np.integer]) -> int:
    length = min(len(first), len(second))
    (differs,) = np.nonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
