"""Long series made short enough to draw, without hiding a spike.

A series of n values becomes at most `points` buckets of neighbours, each with the mean (the line)
and the lowest and highest value (the band). Pure functions on numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line to draw.

    Attributes:
        x: steps, ascending; of a bucket, its last step.
        y: value, or the bucket's mean.
        low: the bucket's lowest value; None when nothing was merged.
        high: the bucket's highest value; None when nothing was merged.
    """

    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


def in_order(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Ascending steps, one value per step: of several values for a step, the last written."""
    if len(steps) < 2 or bool(np.all(steps[1:] > steps[:-1])):
        return steps, values
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    is_last = np.append(steps[1:] != steps[:-1], True)
    return steps[is_last], values[is_last]


def downsample(steps: Floats, values: Floats, points: int) -> Curve:
    """At most `points` points (at least 1) of a series in ascending order."""
    size = len(steps)
    if size <= points:
        return Curve(steps, values)
    starts = np.linspace(0, size, points, endpoint=False).astype(np.int64)
    stops = np.append(starts[1:], size)
    return Curve(
        x=steps[stops - 1],
        y=np.add.reduceat(values, starts) / (stops - starts),
        low=np.minimum.reduceat(values, starts),
        high=np.maximum.reduceat(values, starts),
    )
