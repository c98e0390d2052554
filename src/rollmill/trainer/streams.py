"""Per-token values of one training call, gathered from micro-batches and ranks.

Invariant: after `gather`, every rank holds the same values, each of them computed exactly once;
so metrics made of them do not depend on micro-batches, layout or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollmill.trainer.layout import MicroBatch
from rollmill.trainer.ranks import Ranks

FlatFloats = npt.NDArray[np.float32]


class TokenStreams:
    """Named float32 vectors [T] over the trainable tokens of a batch, zeros at first.

    Attributes:
        values: the vectors by name.
        is_scored: bool [T], where they hold something.
        num_positions: positions that went through the model.
        num_padding: those of them that were padding.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.values: dict[str, FlatFloats] = {}
        self.is_scored: npt.NDArray[np.bool_] = np.zeros(num_tokens, np.bool_)
        self.num_positions = 0
        self.num_padding = 0

    def __getitem__(self, name: str) -> FlatFloats:
        return self.values.setdefault(name, np.zeros(self._num_tokens, np.float32))

    def declare(self, names: Iterable[str]) -> None:
        """Have these vectors, also where this rank records nothing into them."""
        for name in names:
            self[name]

    def record(
        self, micro_batch: MicroBatch, streams: Mapping[str, Tensor], indices: npt.NDArray[Any]
    ) -> None:
        """Put what a micro-batch measured at `indices` of the vectors."""
        self.num_positions += micro_batch.num_positions
        self.num_padding += micro_batch.num_positions - micro_batch.num_tokens
        self.is_scored[indices] = True
        for name, values in streams.items():
            self[name][indices] = values.detach().float().cpu().numpy()

    def gather(self, ranks: Ranks) -> None:
        """Make the values and counts those of all ranks together; every rank must call it."""
        if ranks.size == 1:
            return
        for name in sorted(self.values):
            self.values[name] = ranks.sum(self.values[name])
        self.is_scored = ranks.sum(self.is_scored.astype(np.int64)) > 0
        counts = ranks.sum(np.array([self.num_positions, self.num_padding]))
        self.num_positions, self.num_padding = (int(count) for count in counts)
