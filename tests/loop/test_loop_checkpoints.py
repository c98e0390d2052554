"""Checkpoints that cannot be written: what that costs, and what is left."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmill.config import FaultKind, TelemetryConfig
from rollmill.errors import CheckpointError, LedgerError
from rollmill.loop.fault_plan import Fault
from rollmill.loop.faults import FULL_DISK_BYTES, FaultInjector
from rollmill.loop.records import Records, open_timeline
from rollmill.loop.state import Checkpoints
from rollmill.telemetry.console import RunView
from rollmill.telemetry.dumps import Dumps
from rollmill.telemetry.metrics_log import MetricsLog
from rollmill.telemetry.trackers import open_trackers
from rollmill.trainer.checkpoint import CheckpointStore


class Trainer:
    """Stands in for the trainer's process; its disk may be full."""

    pid = None
    is_disk_full = False

    async def start(self, **_: Any) -> None:
        """It runs."""

    async def stop(self, grace_s: float = 5.0) -> None:
        """It has no process."""

    async def call(self, method: str, /, **arguments: Any) -> Any:
        if method == "save":
            Path(arguments["path"], "weights").write_text("made up")
            if self.is_disk_full:
                raise CheckpointError("the trainer's state cannot be written")


class Nothing:
    """Rollouts without a state; their books may not be writable."""

    is_ledger_broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_ledger_broken:
            raise LedgerError("the ledger cannot be written")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def checkpoints(
    folder: Path, trainer: Trainer, store: CheckpointStore, rollouts: Any = None
) -> Checkpoints:
    telemetry = TelemetryConfig(console=False)
    records = Records(
        MetricsLog(folder / "metrics.jsonl"),
        open_trackers(telemetry, folder),
        open_timeline(telemetry, folder),
        Dumps(telemetry, folder),
    )
    return Checkpoints(
        store,
        trainer=trainer,
        rollouts=rollouts or Nothing(),
        records=records,
        view=RunView(is_on=False, num_steps=9),
        faults=FaultInjector([], folder / "faults.jsonl", pause_s=1.0),
    )


def test_a_full_disk_costs_a_checkpoint_and_only_the_last_one_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        trainer = Trainer()
        store = CheckpointStore(tmp_path / "checkpoints", keep=3)
        saving = checkpoints(tmp_path, trainer, store)
        await saving.save(2, is_last=False)
        trainer.is_disk_full = True
        await saving.save(4, is_last=False)
        with pytest.raises(CheckpointError, match="cannot be written"):
            await saving.save(4, is_last=True)
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["step_000002"], "nothing is left of what could not be written"
        assert await checkpoints(tmp_path, trainer, store).resume() == 2
        trainer.is_disk_full = False
        await saving.save(4, is_last=True)
        assert store.steps() == [2, 4]

    asyncio.run(main())


def test_books_that_cannot_be_written_cost_a_checkpoint_too(tmp_path: Path) -> None:
    async def main() -> None:
        store = CheckpointStore(tmp_path / "checkpoints", keep=3)
        rollouts = Nothing()
        saving = checkpoints(tmp_path, Trainer(), store, rollouts)
        rollouts.is_ledger_broken = True
        await saving.save(2, is_last=False)
        assert list((tmp_path / "checkpoints").iterdir()) == []
        rollouts.is_ledger_broken = False
        await saving.save(3, is_last=False)
        assert store.steps() == [3]

    asyncio.run(main())


WRITER = f"""
import sys
for line in sys.stdin:
    try:
        with open(line.strip(), "wb", buffering=0) as file:
            file.write(bytes({FULL_DISK_BYTES}))
            file.write(bytes({FULL_DISK_BYTES}))
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_the_planned_full_disk_is_one_for_the_trainer_and_for_one_checkpoint(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        faults = FaultInjector(
            [Fault(3, FaultKind.DISK_FULL, 0, 0.0)], tmp_path / "faults.jsonl", pause_s=1.0
        )
        faults.attach(tuple, lambda: process.pid)
        said = []
        for step in (2, 3, 4):
            faults.step_began(step)
            with faults.saving():
                process.stdin.write(f"{tmp_path / str(step)}\n")
                process.stdin.flush()
                said.append(process.stdout.readline().strip())
        assert said == ["written", "File too large", "written"]
        assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == before
        process.stdin.close()
