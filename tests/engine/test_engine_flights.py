"""Aborting the requests in flight on one engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine_script import Fault, Script
from scripted_engine import ScriptedEngine

from rollmill.config.engine import EngineConfig
from rollmill.engine.flights import ABORTS_AT_ONCE
from rollmill.engine.pool import EnginePool

NUM_REQUESTS = 3 * ABORTS_AT_ONCE


async def abort_all(tmp_path: Path, *, answers_aborts: bool, deadline_s: float) -> tuple[int, int]:
    """Requests that an attached engine did not end, and aborts that it was sent."""
    async with asyncio.timeout(30), ScriptedEngine(Script(faults=(Fault("stall"),))) as engine:
        engine.answers_aborts = answers_aborts
        config = EngineConfig(urls=(engine.url,))
        async with EnginePool(config, model_path="none", run_dir=tmp_path) as pool:
            limit = {"max_new_tokens": 50}
            calls = [pool.generate(str(number), [5, 6], limit) for number in range(NUM_REQUESTS)]
            tasks = [asyncio.create_task(call) for call in calls]
            await engine.wait_for_running(NUM_REQUESTS)
            report = await pool.abort_all(deadline_s)
            await asyncio.gather(*tasks, return_exceptions=True)
            return report.num_unanswered, engine.counts["/abort_request"]


def test_every_request_on_a_shared_engine_is_told_to_end(tmp_path: Path) -> None:
    num_left, num_aborts = asyncio.run(abort_all(tmp_path, answers_aborts=True, deadline_s=20))
    assert num_left == 0
    assert num_aborts == NUM_REQUESTS


def test_aborts_of_thousands_of_requests_are_sent_a_few_at_a_time(tmp_path: Path) -> None:
    num_left, num_aborts = asyncio.run(abort_all(tmp_path, answers_aborts=False, deadline_s=1.0))
    assert num_left == NUM_REQUESTS
    assert num_aborts == ABORTS_AT_ONCE  # the others wait until one of these is answered
