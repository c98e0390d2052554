"""Groups that were not trained on, and why: rejected by a filter, or failed.

A filter that turns down nine groups of ten would fill a disk, so a step keeps whole groups up to a
number of samples, and every reason gets its share of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.sample import Group
from rollmill.sample_rows import row_schema, sample_to_row
from rollmill.telemetry.step_files import StepFiles


@dataclass(frozen=True, slots=True)
class Dropped:
    """One group that was not trained on.

    Attributes:
        group: the group with the answers it has.
        decision: `rejected` or `failed`.
        reason: the filter's words, or what went wrong.
    """

    group: Group
    decision: str
    reason: str


class DroppedDump:
    """Writes `FOLDER/step_NNNNNN.parquet`: samples, with the columns `decision` and `reason`.

    Args:
        folder: created when missing.
        max_samples: most samples per step.
    """

    def __init__(self, folder: Path, max_samples: int) -> None:
        self._files = StepFiles(folder, "dropped samples")
        self._max_samples = max_samples

    def write(self, step: int, dropped: Iterable[Dropped]) -> Path | None:
        """Write what was dropped in a step; no file when that is nothing."""
        import pyarrow as pa

        rows = [
            {**sample_to_row(sample), "decision": one.decision, "reason": _utf8(one.reason)}
            for one in fair_choice(list(dropped), self._max_samples)
            for sample in one.group.samples
        ]
        if not rows:
            return None
        schema = row_schema()
        for name in ("decision", "reason"):
            schema = schema.append(pa.field(name, pa.string()))
        return self._files.write(step, pa.Table.from_pylist(rows, schema=schema))

    def forget_after(self, step: int) -> None:
        """Delete the files of steps after `step`: a resume does them again."""
        self._files.forget_after(step)


def fair_choice(dropped: Sequence[Dropped], max_samples: int) -> list[Dropped]:
    """Groups of at most `max_samples` samples together, in the order given.

    The reasons take turns, so a frequent one does not crowd out a rare one. A group that is too
    large for what is left is passed over.
    """
    turns: dict[tuple[str, str], int] = {}
    order = []
    for place, one in enumerate(dropped):
        turn = turns.setdefault((one.decision, one.reason), 0)
        turns[one.decision, one.reason] += 1
        order.append((turn, place))
    left, chosen = max_samples, []
    for _, place in sorted(order):
        size = len(dropped[place].group.samples)
        if size <= left:
            left -= size
            chosen.append(place)
    return [dropped[place] for place in sorted(chosen)]


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
