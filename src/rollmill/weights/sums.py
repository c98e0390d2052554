"""Comparing the checksums of weights: the engines' with the trainer's, and with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.engine.weight_calls import WeightSums
from rollmill.errors import EngineError

NUM_NAMED = 3
"""Weights that an error names."""


@dataclass(frozen=True)
class TrainerSums:
    """Checksums of weights as the trainer sent them.

    Attributes:
        by_weight: checksum by the weight's name; tied weights once.
        dtypes: precision by the weight's name.
        algorithm: what kind of checksum it is.
    """

    by_weight: Mapping[str, str]
    dtypes: Mapping[str, str]
    algorithm: str

    @classmethod
    def read(cls, report: Mapping[str, Any]) -> TrainerSums | None:
        """From what the trainer says of weights it wrote; None when it names no checksums."""
        if "checksums" not in report:
            return None
        dtypes = {name: dtype for name, dtype, _ in report["weights"]}
        return cls(report["checksums"], dtypes, report["algorithm"])


def check_sums(engines: Mapping[str, WeightSums], trainer: TrainerSums | None) -> None:
    """Raise `EngineError` when an engine serves other weights than the trainer sent.

    An engine whose checksums are of another kind than the trainer's (SGLang) is compared with the
    other engines of its kind alone. A weight that an engine keeps in another precision than was
    sent has other bytes and is left out.
    """
    for url, sums in engines.items():
        if trainer is not None and sums.algorithm == trainer.algorithm:
            different = _different(sums, trainer)
            if different:
                raise EngineError(
                    "an engine serves other weights than the trainer sent",
                    where=f"weights.verify_checksum: {url}",
                    expected="the trainer's checksum of every weight",
                    found=f"{len(different)} that differ: {', '.join(different[:NUM_NAMED])}",
                )
    totals = {(sums.algorithm, sums.total) for sums in engines.values()}
    if len(totals) > len({algorithm for algorithm, _ in totals}):
        raise EngineError(
            "the engines serve different weights under one version",
            where="weights.verify_checksum",
            expected="one checksum on all engines of one kind",
            found=", ".join(f"{url}: {one.total}" for url, one in sorted(engines.items())),
        )


def _different(engine: WeightSums, trainer: TrainerSums) -> list[str]:
    return [
        name
        for name, value in trainer.by_weight.items()
        if engine.by_weight.get(name) != value
        and engine.dtypes.get(name) in (None, trainer.dtypes[name])
    ]
