"""The runs that a viewer shows: each a folder, read through the parts of this room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rollmill.viewer.errors import ViewerError
from rollmill.viewer.ledger_view import LedgerView
from rollmill.viewer.metrics_index import MetricsIndex
from rollmill.viewer.sample_files import SampleFiles
from rollmill.viewer.timeline_view import TimelineView
from rollmill.viewer.tokenizer import RunTokenizer, read_config

MARKS = ("config.yaml", "metrics.jsonl")
"""A folder with one of these is a run."""


class Run:
    """One run folder, open for reading.

    Args:
        name: how the page calls it; unique.
        root: the folder.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.config = read_config(root)
        reward = self.config.get("reward")
        self.reward_key: str | None = reward.get("reward_key") if isinstance(reward, dict) else None
        self.metrics = MetricsIndex(root / "metrics.jsonl")
        self.samples = SampleFiles(root, self.reward_key)
        self.ledger = LedgerView(root / "ledger.sqlite")
        self.timeline = TimelineView(root, self.metrics, self.ledger)

    @cached_property
    def tokenizer(self) -> RunTokenizer:
        """The run's tokenizer; loaded when its first token is shown."""
        return RunTokenizer(self.root, self.config)

    def setting(self, *path: str) -> Any:
        """A value of the run's configuration; None when there is none."""
        value: Any = self.config
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, in that order, named by the ends of their paths that tell them apart.

    Raises:
        ViewerError: there is none, one is no run folder, or one is given twice.
    """
    if not folders:
        raise ViewerError(
            "there is no run to show",
            expected="one run folder or more",
            fix="give the run.dir of a training run: rollmill view runs/mine",
        )
    roots = [folder.expanduser().resolve() for folder in folders]
    for given, root in zip(folders, roots, strict=True):
        if not any((root / mark).is_file() for mark in MARKS):
            raise ViewerError(
                "this is not a run folder",
                where=str(given),
                expected=f"a folder with {' or '.join(MARKS)}",
                found="a folder without them" if root.is_dir() else "nothing",
                fix="give the folder that run.dir named when it was trained",
            )
    if len(set(roots)) < len(roots):
        raise ViewerError(
            "a run is given twice", expected="each run folder once", fix="give each folder once"
        )
    return [Run(name, root) for name, root in zip(_names(roots), roots, strict=True)]


def _names(roots: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    depth = 1
    while True:
        names = ["/".join(root.parts[-depth:]) for root in roots]
        if max(Counter(names).values()) == 1:
            return names
        depth += 1
