"""Leaving the group of a broadcast transport, whatever the others in it are doing."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from weight_run import weight_run

from rollmill.weights import group


def test_a_run_that_ends_while_the_trainer_is_busy_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "LEAVE_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with weight_run(tmp_path, num_engines=1, transport="distributed") as run:
            await run.sync()
            assert run.trainer.pid is not None
            os.kill(run.trainer.pid, signal.SIGSTOP)  # as long a step as there can be
            try:
                async with asyncio.timeout(20):
                    await run.transport.close()
            finally:
                os.kill(run.trainer.pid, signal.SIGCONT)
            await run.train()
            await run.sync()
            assert await run.served() == [await run.expected()], "and the group can be made anew"

    asyncio.run(main())
