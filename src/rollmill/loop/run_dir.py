"""The run folder: what lies where, and that only one process works in it."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import yaml

from rollmill.config import Config
from rollmill.config.load import to_plain
from rollmill.errors import ConfigError


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The configuration of the last start, with every default."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON line per step and per evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """The books."""
        return self.root / "ledger.sqlite"

    @property
    def samples(self) -> Path:
        """Trained samples, one Parquet file per step."""
        return self.root / "samples"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one folder per step."""
        return self.root / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """A copy of the tokenizer that the run uses."""
        return self.root / "tokenizer"

    @property
    def logs(self) -> Path:
        """Output of the worker processes."""
        return self.root / "logs"

    def eval_samples(self, name: str) -> Path:
        """Answers of one evaluation set, one Parquet file per evaluation."""
        return self.root / "eval" / name

    @property
    def is_started(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("step_*"))

    def write_down(self, config: Config, tokenizer: Any) -> None:
        """Configuration and tokenizer of this start.

        In a run that is gone on with: only after its checkpoint was found to fit, because what
        reads the run later (export, replay, the viewer) takes both from here.
        """
        self.write_config(config)
        self.write_tokenizer(tokenizer)

    def write_config(self, config: Config) -> None:
        """Write down the whole configuration."""
        self.root.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)
        aside = self.config.with_suffix(".tmp")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, self.config)

    def write_tokenizer(self, tokenizer: Any) -> None:
        """Keep the tokenizer, so that a run that was moved can still be read token by token."""
        aside = self.tokenizer.with_name("tokenizer.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(self.tokenizer, ignore_errors=True)
        os.replace(aside, self.tokenizer)


class RunLock:
    """Held while a process works in a run folder; gone with the process, however it ends."""

    def __init__(self, root: Path) -> None:
        self._path = root / ".lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(
                "another process is working in this run folder",
                where=str(self._path.parent),
                expected="one process per run folder",
                fix="wait for it, stop it, or choose another run.dir",
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
