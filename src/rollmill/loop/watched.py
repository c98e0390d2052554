"""Engines, judge and generate functions whose work is registered while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from rollmill.engine.types import GenerateResult
from rollmill.loop.activities import Activities, Kind
from rollmill.rewards.outcome import Outcome
from rollmill.rollout.generate import Engines, Generate, GenerateContext
from rollmill.rollout.group import Grader, GroupRunner
from rollmill.sample import Sample


class WatchedEngines:
    """Engines whose requests are registered."""

    def __init__(self, engines: Engines, activities: Activities) -> None:
        self._engines = engines
        self._activities = activities

    async def generate(
        self,
        rid: str,
        input_ids: npt.ArrayLike,
        sampling: dict[str, Any],
        *,
        session_id: str | None = None,
    ) -> GenerateResult:
        """One engine call."""
        return await self._activities.run(
            Kind.REQUEST,
            rid,
            lambda: self._engines.generate(rid, input_ids, sampling, session_id=session_id),
        )

    async def abort_all(self, deadline_s: float) -> object:
        """Stop every request on every engine."""
        return await self._engines.abort_all(deadline_s)


class WatchedGrader:
    """A judge whose judgements are registered."""

    def __init__(self, grader: Grader, activities: Activities) -> None:
        self._grader = grader
        self._activities = activities

    async def judge(self, sample: Sample) -> Outcome:
        """The outcome for one sample."""
        return await self._activities.run(
            Kind.REWARD,
            f"of sample {sample.index}",
            lambda: self._grader.judge(sample),
            group=sample.group_index,
        )

    async def judge_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes for all answers to a prompt."""
        group = samples[0].group_index if samples else None
        return await self._activities.run(
            Kind.REWARD,
            f"of group {group}",
            lambda: self._grader.judge_group(samples),
            group=group,
        )


def watched(runner: GroupRunner, activities: Activities) -> GroupRunner:
    """A runner whose generate functions are registered, the run's and those samples name."""

    def wrap(generate: Generate) -> Generate:
        async def registered(sample: Sample, context: GenerateContext) -> Sample | list[Sample]:
            name = f"of sample {sample.index} (attempt {sample.attempt})"
            return await activities.run(
                Kind.ANSWER, name, lambda: generate(sample, context), group=sample.group_index
            )

        return registered

    overrides = runner.overrides
    return replace(
        runner, generate=wrap(runner.generate), overrides=lambda name: wrap(overrides(name))
    )
