"""Which row comes next, over epochs and mixed parts: pure arithmetic, no rows.

Each part is walked epoch by epoch; shuffled, every epoch is a permutation of the *original*
order drawn from (seed, epoch, part) with its own generator, so it depends on nothing else.
Parts with weights are interleaved evenly and without randomness: every draw comes from the part
that is furthest behind its share, so that after N draws none is more than one above N·wᵢ/Σw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_SEED_MODULUS = 2**63


@dataclass(slots=True)
class _Cursor:
    """Position in one part.

    Attributes:
        size: rows of the part.
        epoch: which walk over them.
        offset: rows given in this epoch, at most `size`.
        num_given: rows given since the mixture began: what it balances.
    """

    size: int
    epoch: int = 0
    offset: int = 0
    num_given: int = 0
    order: npt.NDArray[np.int64] | None = None


class RowOrder:
    """An endless sequence of (part, row) with a position that can be saved.

    Args:
        sizes: rows per part, each at least 1.
        weights: mixing weight per part, each above 0.
        shuffle: permute each epoch; otherwise rows come in their own order.
        seed: of the permutations.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, shuffle: bool, seed: int
    ) -> None:
        if not sizes or min(sizes) < 1 or min(weights) <= 0:
            raise ValueError(f"sizes and weights must be positive: {sizes}, {weights}")
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._cursors = [_Cursor(size) for size in sizes]
        if len(self._shares) != len(self._cursors):
            raise ValueError(f"{len(sizes)} sizes for {len(weights)} weights")
        self._shuffle = shuffle
        self._seed = seed % _SEED_MODULUS

    def next(self) -> tuple[int, int]:
        """The part and the row number within it that come next."""
        part = self._most_behind()
        cursor = self._cursors[part]
        if cursor.offset >= cursor.size:
            cursor.epoch, cursor.offset, cursor.order = cursor.epoch + 1, 0, None
        if cursor.order is None:
            cursor.order = self._permutation(part, cursor)
        row = int(cursor.order[cursor.offset])
        cursor.offset += 1
        cursor.num_given += 1
        return part, row

    def _most_behind(self) -> int:
        if len(self._cursors) == 1:
            return 0
        num_drawn = 1 + sum(cursor.num_given for cursor in self._cursors)
        owed = [
            share * num_drawn - cursor.num_given
            for share, cursor in zip(self._shares, self._cursors, strict=True)
        ]
        return owed.index(max(owed))

    def _permutation(self, part: int, cursor: _Cursor) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(cursor.size, dtype=np.int64)
        generator = np.random.default_rng((self._seed, cursor.epoch, part))
        return generator.permutation(cursor.size).astype(np.int64, copy=False)

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values."""
        return {
            "shares": self._shares,
            "parts": [
                {"epoch": c.epoch, "offset": c.offset, "num_given": c.num_given}
                for c in self._cursors
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave for parts of the same sizes.

        Given other weights than there, the mixture begins anew: nothing is made up for.
        """
        is_same_mixture = state.get("shares", self._shares) == self._shares
        for cursor, saved in zip(self._cursors, state["parts"], strict=True):
            cursor.epoch, cursor.offset = int(saved["epoch"]), int(saved["offset"])
            cursor.num_given = int(saved["num_given"]) if is_same_mixture else 0
            cursor.order = None

    def start_after(self, state: dict[str, Any]) -> None:
        """Begin a new epoch, later than all those of a position in *other* rows."""
        epoch = 1 + max((int(saved["epoch"]) for saved in state["parts"]), default=-1)
        for cursor in self._cursors:
            cursor.epoch, cursor.offset, cursor.num_given, cursor.order = epoch, 0, 0, None
