"""Engines and judge with a stopwatch: the same calls, each a span on the run's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from rollmill.engine.types import GenerateResult
from rollmill.rewards.outcome import Outcome
from rollmill.rollout.generate import Engines
from rollmill.rollout.group import Grader
from rollmill.sample import Sample
from rollmill.telemetry.timeline import Timeline


class TracedEngines:
    """Engines whose requests show on the lane `engines`."""

    def __init__(self, engines: Engines, timeline: Timeline) -> None:
        self._engines = engines
        self._timeline = timeline

    async def generate(
        self,
        rid: str,
        input_ids: npt.ArrayLike,
        sampling: dict[str, Any],
        *,
        session_id: str | None = None,
    ) -> GenerateResult:
        """One engine call."""
        with self._timeline.span("engines", "generate", request=rid) as details:
            result = await self._engines.generate(rid, input_ids, sampling, session_id=session_id)
            details["tokens"] = result.num_tokens
            return result

    async def abort_all(self, deadline_s: float) -> object:
        """Stop every request on every engine."""
        with self._timeline.span("engines", "abort"):
            return await self._engines.abort_all(deadline_s)


class TracedGrader:
    """A judge whose judgements show on the lane `rewards`."""

    def __init__(self, grader: Grader, timeline: Timeline) -> None:
        self._grader = grader
        self._timeline = timeline

    async def judge(self, sample: Sample) -> Outcome:
        """The outcome for one sample."""
        with self._timeline.span("rewards", "judge", group=sample.group_index):
            return await self._grader.judge(sample)

    async def judge_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes for all answers to a prompt."""
        group = samples[0].group_index if samples else None
        with self._timeline.span("rewards", "judge group", group=group):
            return await self._grader.judge_group(samples)
