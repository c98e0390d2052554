"""Reading `results.json`: curves, means and spreads over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """A number over seeds: mean, standard deviation (0 for one seed), and the values."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Over seeds, with n − 1."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        mean = f"{self.mean:.3f}"
        return mean if len(self.values) == 1 else f"{mean} ± {self.deviation:.3f}"

    def __sub__(self, other: Spread) -> Spread:
        pairs = zip(self.values, other.values, strict=True)
        return Spread(tuple(a - b for a, b in pairs))


class Runs:
    """The runs of one arm with one student and one pair of teachers, a seed each.

    Args:
        results: as in `results.json`.
        student: which.
        arm: which.
        teachers: of SFT and of the distillation, as in `AB`.
    """

    def __init__(self, results: Record, student: str, arm: str, teachers: str = "AA") -> None:
        self.records: list[Record] = [
            record
            for record in results["runs"]
            if (record["student"], record["arm"]) == (student, arm)
            and record["sft_teacher"] + record["opd_teacher"] == teachers
        ]

    @property
    def steps(self) -> list[int]:
        """When the students were measured."""
        return [point["step"] for point in self.records[0]["curve"]]

    def at(self, step: int, name: str = "kl") -> Spread:
        """A measured number after a step."""
        return Spread(tuple(self._point(record, step)[name] for record in self.records))

    def lowest(self) -> int:
        """The step of the lowest mean KL."""
        return min(self.steps, key=lambda step: self.at(step).mean)

    def seconds(self, phases: Iterable[str]) -> Spread:
        """Spent in some phases together."""
        wanted = list(phases)
        return Spread(
            tuple(sum(r["seconds"].get(phase, 0.0) for phase in wanted) for r in self.records)
        )

    def total(self, name: str) -> Spread:
        """A count of the whole run."""
        return Spread(tuple(float(record[name]) for record in self.records))

    @staticmethod
    def _point(record: Record, step: int) -> Record:
        (point,) = (point for point in record["curve"] if point["step"] == step)
        found: Record = point
        return found


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, all columns but the first to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
