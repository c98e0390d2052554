"""The thread that owns the model: what becomes of requests when a step fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.engine.embedded.engine import EmbeddedEngine
from rollmill.engine.embedded.model import ModelRunner
from rollmill.engine.embedded.sampling import SamplingParams
from rollmill.engine.embedded.sequence import LogprobRequest, Sequence
from rollmill.engine.embedded.stopping import StopRules

PROMPT = [5, 9, 23, 40, 8]


class DamagedTokenizer:
    """Cannot decode anything."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        raise ValueError(f"cannot decode {len(tokens)} tokens")


def test_an_answer_that_ended_in_a_step_that_then_fails_is_delivered(llama_folder: Path) -> None:
    config = EmbeddedEngineConfig(num_threads=1, device="cpu")
    moved: list[Sequence] = []
    is_told = threading.Event()

    def notify(sequences: list[Sequence]) -> None:
        moved.extend(sequences)
        if len(moved) >= 2:
            is_told.set()

    runner = ModelRunner(str(llama_folder), config)
    stops = StopRules(frozenset(), DamagedTokenizer())
    engine = EmbeddedEngine(runner, stops, weight_version="0", notify=notify)
    ends = Sequence("ends", PROMPT, SamplingParams(max_new_tokens=1), LogprobRequest(), seed=0)
    with_stop = SamplingParams(max_new_tokens=8, stop=("x",))
    fails = Sequence("fails", PROMPT, with_stop, LogprobRequest(), seed=0)
    engine.submit(ends)
    engine.submit(fails)  # in the same step, after the first one has ended
    engine.start()
    try:
        assert is_told.wait(60)
    finally:
        engine.stop()
    assert ends.finish_reason == {"type": "length", "length": 1}
    assert fails.finish_reason is not None
    assert fails.finish_reason["status_code"] == 500
    assert "cannot decode 1 tokens" in fails.finish_reason["message"]
    assert sorted(s.rid for s in moved) == ["ends", "fails"]
