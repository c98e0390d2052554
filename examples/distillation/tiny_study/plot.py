"""The curves of all arms as an SVG: reverse KL over optimizer steps, one panel per student."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiny_study.arms import ARMS
from tiny_study.models import STUDENTS
from tiny_study.results import Record, Runs

COLORS = {
    "sft": "#8c8c8c",
    "live": "#1f77b4",
    "offline": "#d62728",
    "truncated": "#e6a417",
    "frozen": "#6a3d9a",
}
WIDTH, HEIGHT = 440, 340
LEFT, TOP, RIGHT, BOTTOM = 56, 34, 14, 44
LEGEND = 34


@dataclass(frozen=True)
class Axes:
    """From steps and divergences to places in a panel: steps as their root, KL as its logarithm."""

    origin: float
    last_step: int
    low: float
    high: float

    def x(self, step: int) -> float:
        """Pixels from the left."""
        return self.origin + LEFT + math.sqrt(step / self.last_step) * (WIDTH - LEFT - RIGHT)

    def y(self, kl: float) -> float:
        """Pixels from the top; what is out of range is on the border."""
        share = math.log(max(kl, self.low) / self.low) / math.log(self.high / self.low)
        return HEIGHT - BOTTOM - min(share, 1) * (HEIGHT - TOP - BOTTOM)


def draw_curves(results: Record) -> str:
    """The SVG. Lines are means over seeds, bands go from the lowest to the highest seed."""
    total = WIDTH * len(STUDENTS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT + LEGEND}" '
        f'viewBox="0 0 {total} {HEIGHT + LEGEND}" font-family="sans-serif" font-size="12">',
        f'<rect width="{total}" height="{HEIGHT + LEGEND}" fill="#ffffff"/>',
    ]
    for number, student in enumerate(STUDENTS):
        parts += _panel(results, student, number * WIDTH)
    parts += _legend()
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(results: Record, student: str, origin: float) -> list[str]:
    runs = {arm: Runs(results, student, arm) for arm in ARMS}
    steps = runs["live"].steps
    axes = _axes(steps[-1], list(runs.values()), origin)
    middle = origin + LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts = [
        _text(middle, 18, f"student {STUDENTS[student]}", "middle", weight="bold"),
        _text(middle, HEIGHT - 8, "optimizer steps (root scale)", "middle"),
        f'<text transform="translate({origin + 14},{(HEIGHT + TOP - BOTTOM) / 2}) rotate(-90)" '
        'text-anchor="middle">reverse KL per answer, nats (log scale)</text>',
        *_grid(axes, steps),
    ]
    for arm, of_arm in runs.items():
        parts += _curve(axes, of_arm, COLORS[arm])
    return parts


def _axes(last_step: int, runs: Sequence[Runs], origin: float) -> Axes:
    """A range of whole decades around everything."""
    values = [v for each in runs for step in each.steps for v in each.at(step).values if v > 0]
    low = 10 ** math.floor(math.log10(min(values)))
    high = 10 ** math.ceil(math.log10(max(values)))
    return Axes(origin, last_step, low, max(high, 10 * low))


def _grid(axes: Axes, steps: Sequence[int]) -> list[str]:
    parts = []
    left, right = axes.x(0), axes.x(axes.last_step)
    for power in range(round(math.log10(axes.low)), round(math.log10(axes.high)) + 1):
        y = axes.y(10.0**power)
        parts.append(_line(left, y, right, y))
        parts.append(_text(left - 6, y + 4, f"{10.0**power:g}", "end"))
    shown = -math.inf
    for step in steps:
        x = axes.x(step)
        parts.append(_line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 4, color="#333333"))
        if x - shown >= 30:
            parts.append(_text(x, HEIGHT - BOTTOM + 17, str(step), "middle"))
            shown = x
    return parts


def _curve(axes: Axes, runs: Runs, color: str) -> list[str]:
    def path(value: Callable[[tuple[float, ...]], float]) -> list[str]:
        return [
            f"{axes.x(step):.1f},{axes.y(value(runs.at(step).values)):.1f}" for step in runs.steps
        ]

    band = " ".join([*path(min), *reversed(path(max))])
    line = " ".join(path(lambda values: sum(values) / len(values)))
    return [
        f'<polygon points="{band}" fill="{color}" opacity="0.18"/>',
        f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>',
    ]


def _legend() -> list[str]:
    parts, x, y = [], float(LEFT), HEIGHT + LEGEND / 2
    for arm, color in COLORS.items():
        parts.append(f'<rect x="{x:.0f}" y="{y - 5}" width="18" height="4" fill="{color}"/>')
        parts.append(_text(x + 24, y + 2, ARMS[arm].title, "start"))
        x += 40 + 7 * len(ARMS[arm].title)
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "#dddddd") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'
    )
