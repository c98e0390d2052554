"""A preparation in the terminal: a bar per phase; a line per phase where there is no terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from rollmill.distill.prepare import Progress

PHASES = {
    "generate": "answering",
    "student": "student scores",
    "teacher": "teacher scores",
}


class PrepareView:
    """Shows a preparation's progress; use as a context manager and pass `show` on."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bars.add_task("starting engines", total=None)
        self._shown: tuple[int, str] | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        """One more answer of a phase is done."""
        phase = PHASES.get(progress.phase, progress.phase)
        text = f"shard {progress.shard + 1} of {progress.num_shards}: {phase}"
        if self._shown != (progress.shard, progress.phase):
            self._shown = (progress.shard, progress.phase)
            self._bars.reset(self._task, total=progress.total, description=text)
        self._bars.update(self._task, completed=progress.done)
        if progress.done == progress.total and not self._console.is_terminal:
            self._console.print(f"{text}: {progress.total} answers")
