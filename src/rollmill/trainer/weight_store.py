"""The weights of recent versions, as engines get them: rounded once, on the CPU, at rank 0.

The trainer goes on training while engines may still need the version before: one that starts anew
must serve what the others serve, and a delta starts from what the engines hold. Invariant: what was
staged does not change until it is released.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from rollmill.errors import TrainerError
from rollmill.exchange.buckets import specs_of
from rollmill.exchange.checksum import ALGORITHM, checksums_of, without_ties
from rollmill.exchange.delta import Side, write_delta
from rollmill.trainer.weight_files import changed_share, engine_tensors, write_folder


class WeightStore:
    """Staged weights by number.

    Args:
        model: whose weights.
        is_holder: with several ranks every one must call `stage`, and this one keeps the result.
    """

    def __init__(self, model: Any, *, is_holder: bool = True) -> None:
        self._model = model
        self._is_holder = is_holder
        self._staged: dict[int, dict[str, Tensor]] = {}
        self._checksums: dict[int, dict[str, str]] = {}
        self._dtype = ""
        self._num_stages = 0

    def stage(self, *, dtype: str, keep: int | None) -> dict[str, Any]:
        """Keep the weights of now, in the engines' precision.

        Args:
            dtype: that precision.
            keep: the only stage to keep beside the new one.

        Returns:
            `stage` (its number), `weights` (name, precision, shape of each; tied ones once),
            `checksums` with their `algorithm`, `num_bytes`, `seconds`, and `changed_share`: the
            share of elements that differ from stage `keep`, None without one. Nothing on ranks that
            do not keep it.
        """
        start = time.perf_counter()
        self.release(keep=keep)
        tensors = engine_tensors(self._model, dtype)
        self._num_stages += 1
        if not self._is_holder:
            return {}
        stage = self._num_stages
        self._dtype = dtype
        self._staged[stage] = tensors
        share = changed_share(self._staged[keep], tensors) if keep in self._staged else None
        weights = without_ties(tensors.items())
        self._checksums[stage] = checksums_of(weights)
        return {
            "stage": stage,
            "weights": [[s.name, s.dtype, list(s.shape)] for s in specs_of(weights)],
            "checksums": self._checksums[stage],
            "algorithm": ALGORITHM,
            "num_bytes": sum(t.numel() * t.element_size() for t in weights.values()),
            "seconds": time.perf_counter() - start,
            "changed_share": share,
        }

    def release(self, *, keep: int | None) -> None:
        """Forget every stage but this one."""
        self._staged = {n: tensors for n, tensors in self._staged.items() if n == keep}
        self._checksums = {n: sums for n, sums in self._checksums.items() if n == keep}

    def weights(self, stage: int) -> dict[str, Tensor]:
        """The weights of a stage, tied ones once.

        Raises:
            TrainerError: it was released.
        """
        return without_ties(self._tensors(stage).items())

    def write(self, stage: int, folder: Path) -> int:
        """Write a stage as a Hugging Face folder; the bytes of weights.

        Raises:
            TrainerError: it was released.
        """
        return write_folder(self._model, self._tensors(stage), folder, dtype=self._dtype)

    def write_delta(
        self, base: int, stage: int, path: Path, *, base_version: int, version: int
    ) -> int:
        """Write what leads from one stage to another; the bytes.

        Raises:
            TrainerError: one of them was released.
        """
        return write_delta(
            path,
            self.weights(base),
            self.weights(stage),
            Side(base_version, self._checksums[base]),
            Side(version, self._checksums[stage]),
        )

    def _tensors(self, stage: int) -> dict[str, Tensor]:
        if stage not in self._staged:
            raise TrainerError(
                "weights that engines need are not kept any more",
                expected=f"stage {stage}",
                found=", ".join(map(str, self._staged)) or "none",
            )
        return self._staged[stage]
