"""What a person sees in the terminal while a run goes on.

On a terminal: a live line for what is happening now, under one row per finished step. Elsewhere (a
log file, CI): the same rows as plain lines. Model output is printed as data, never interpreted as
markup.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from rollmill.sample import Sample
from rollmill.telemetry.progress import Progress

logger = logging.getLogger(__name__)

SPARKS = "▁▂▃▄▅▆▇█"
MAX_SHOWN_CHARS = 300


class Column(NamedTuple):
    """One figure of a step's row: title, name of the metric, format, unit behind it."""

    title: str
    metric: str
    form: str
    unit: str = ""

    def header(self) -> str:
        """The title over the figures."""
        return f"{self.title:>{self._width}}"

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The figure; a dash where it was not measured."""
        width = self._width - len(self.unit)
        if self.metric not in metrics:
            return f"{'-':>{width}}{self.unit}"
        return format(metrics[self.metric], f"{width}{self.form}") + self.unit

    @property
    def _width(self) -> int:
        return WIDTHS.get(self.title, 7)


WIDTHS = {"len": 6, "trunc": 6, "agree": 6, "Δlogp": 8, "rollout": 10, "train": 7, "sync": 6}
"""Characters of a column, where not 7."""
LEARNED_COLUMNS = (
    Column("reward", "reward/mean", ".3f"),
    Column("len", "rollout/response_length_mean", ".1f"),
    Column("trunc", "rollout/truncated", ".2f"),
    Column("agree", "rollout/zero_std_groups", ".2f"),
    Column("grad", "train/optimizer/grad_norm", ".2f"),
    Column("Δlogp", "train/mismatch/log_prob_diff_mean", ".1e"),
    Column("rollout", "time/rollout_s", ".1f", "s"),
    Column("train", "time/train_s", ".1f", "s"),
    Column("sync", "time/sync_s", ".1f", "s"),
    Column("tok/s", "rollout/tokens_per_second", ".0f"),
)
IMITATED_COLUMNS = (
    Column("nll", "train/sft/nll", ".4f"),
    Column("ppl", "train/sft/perplexity", ".3f"),
    Column("len", "rollout/response_length_mean", ".1f"),
    Column("trunc", "rollout/truncated", ".2f"),
    Column("learned", "train/tokens/trained", ".0f"),
    Column("grad", "train/optimizer/grad_norm", ".2f"),
    Column("train", "time/train_s", ".1f", "s"),
    Column("tok/s", "train/tokens/per_second", ".0f"),
)
"""Of steps that imitate answers (SFT): there is no reward and no engine to compare with."""


class LastingConsole(Console):
    """A console that falls silent when nobody reads it any more: a run outlives its terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As always, or nothing."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._fall_silent(error)

    def on_broken_pipe(self) -> None:
        """Not the end of the program."""
        self._fall_silent("broken pipe")

    def _fall_silent(self, why: object) -> None:
        if not self.quiet:
            self.quiet = True
            logger.info("nothing is shown from now on: %s", why)


class RunView:
    """The terminal view of one run. Use as a context manager.

    Args:
        is_on: False shows nothing.
        num_steps: length of the run.
        console: where to show it; None is the standard output.
    """

    def __init__(self, *, is_on: bool, num_steps: int, console: Console | None = None) -> None:
        self._console = console or LastingConsole(quiet=not is_on, highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._live: Live | None = None
        self._main: list[float] = []
        self._main_title = ""
        self._phase = ""
        self._phase_started = time.monotonic()
        self._has_header = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._now)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._phase = ""
        if self._live is not None and not self._console.quiet:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Say what is happening now."""
        self._phase = text
        self._phase_started = time.monotonic()

    def progress(self, progress: Progress) -> None:
        """Say how far the batch is."""
        rate = progress.tokens / max(progress.seconds, 1e-9)
        reasons = ", ".join(f"{k} {v}" for k, v in progress.reasons.items() if v)
        parts = [
            f"{progress.accepted}/{progress.target} groups",
            f"{progress.in_flight} in flight",
            f"{progress.rejected} rejected" + (f" ({reasons})" if reasons else ""),
            f"{progress.failed} failed" if progress.failed else "",
            f"{rate:.0f} tok/s",
        ]
        self._phase = "rollout: " + ", ".join(part for part in parts if part)

    def message(self, text: str) -> None:
        """One line of text, shown as it is."""
        self._console.print(Text(text))

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row for a finished step."""
        columns = IMITATED_COLUMNS if "train/sft/nll" in metrics else LEARNED_COLUMNS
        if not self._has_header:
            titles = " ".join([f"{'step':>9}", *(column.header() for column in columns)])
            self._console.print(Text(titles, style="bold"))
            self._has_header = True
        self._main_title = columns[0].title
        if columns[0].metric in metrics:
            self._main.append(metrics[columns[0].metric])
        cells = " ".join(column.cell(metrics) for column in columns)
        self._console.print(Text(f"{step:>4}/{self._num_steps:<4} {cells}"))

    def eval_done(
        self, step: int, metrics: Mapping[str, float], shown: Sequence[Sample] = ()
    ) -> None:
        """The main figures of an evaluation, and some answers."""
        for name in sorted({key.split("/")[1] for key in metrics if key.startswith("eval/")}):
            figures = {
                key.removeprefix(f"eval/{name}/"): value
                for key, value in metrics.items()
                if key.startswith(f"eval/{name}/")
            }
            keys = ["reward", *sorted(k for k in figures if k.startswith("pass@")), "truncated"]
            shown_keys = [key for key in keys if key in figures or key == "reward"]
            line = "  ".join(
                f"{key} {figures[key]:.3f}" if key in figures else f"{key} -" for key in shown_keys
            )
            failed = f"  failed {figures['failed']:.0f}" if figures.get("failed") else ""
            self._console.print(
                f"[bold]eval after step {step}[/bold]  {escape(name)}: {line}{failed}"
            )
        for sample in shown:
            self._show(sample)

    def _show(self, sample: Sample) -> None:
        reward = f"{sample.reward:g}" if isinstance(sample.reward, float) else str(sample.reward)
        self._console.print(Text(f"    prompt  {_shown(_question(sample))}", style="dim"))
        self._console.print(Text(f"    answer  {_shown(sample.response)}"))
        self._console.print(Text(f"    reward  {reward}"))

    def _now(self) -> Text:
        if not self._phase:
            return Text("")
        spark = sparkline(self._main[-40:])
        seconds = time.monotonic() - self._phase_started
        return Text(
            f"  {self._phase}  {seconds:.0f}s  {f'{self._main_title} {spark}' if spark else ''}"
        )


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of bars, lowest to highest; empty for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((v - low) / span * (len(SPARKS) - 1))] for v in values)


def _question(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return str(sample.prompt[-1].get("content", "")) if sample.prompt else ""


def _shown(text: str) -> str:
    """Text on one line, control characters made visible, cut to a readable length."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[:MAX_SHOWN_CHARS]}…"
