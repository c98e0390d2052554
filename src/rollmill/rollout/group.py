"""One group from prompt to judged answers: n attempts at once, each with its own fate.

A failure in one attempt (the engine, a hook, a grader) ends as that sample's status and reason and
never leaves this module as an exception. When the gate closes, everything here ends at once:
requests come back with what they have, graders of answers that no batch waits for are cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from rollmill.config.reward import RewardConfig
from rollmill.rewards.judge import Judge
from rollmill.rewards.outcome import Outcome, apply_outcome
from rollmill.rollout.gate import GateClosed
from rollmill.rollout.generate import Generate, GenerateContext
from rollmill.sample import Group, Sample, Status

logger = logging.getLogger(__name__)
T = TypeVar("T")
SampleHook = Callable[[Sample], "Awaitable[None] | None"]


@dataclass(frozen=True)
class GroupRunner:
    """Runs groups; one for training and one per evaluation set.

    Attributes:
        generate: the run's generate function.
        overrides: generate functions that samples may name (`Sample.generate_function`).
        context: what generate functions get.
        judge: gives the rewards.
        reward: how outcomes become numbers.
        max_retries: fresh tries of a failed sample before it is FAILED.
        sample_hook: runs on each answer between generation and reward.
    """

    generate: Generate
    overrides: dict[str, Generate]
    context: GenerateContext
    judge: Judge
    reward: RewardConfig
    max_retries: int
    sample_hook: SampleHook | None = None

    async def run(self, group: Group) -> Group:
        """Finish the group in place, as far as the gate allows.

        Afterwards every sample is finished and judged, or FAILED with its reason, or (the gate
        closed) PENDING or ABORTED with the tokens it has.
        """
        attempts = group.attempts()
        finished = await asyncio.gather(*(self._attempt(samples) for samples in attempts))
        group.samples = [sample for samples in finished for sample in samples]
        if self.reward.per_group and group.is_finished and not self.context.gate.is_closed:
            await self._judge_group(group)
        return group

    async def _attempt(self, samples: list[Sample]) -> list[Sample]:
        answers: list[Sample] = []
        for sample in samples:
            is_open = not sample.status.is_finished
            answers += await self._generate(sample) if is_open else [sample]
        await asyncio.gather(*(self._judge(sample) for sample in answers))
        return answers

    async def _generate(self, sample: Sample) -> list[Sample]:
        """The finished samples of one attempt; fresh tries after failures."""
        function = self._generate_function(sample)
        reason = "no attempt was made"
        started = time.monotonic()
        for _ in range(self.max_retries + 1):
            if self.context.gate.is_closed:
                return [_stopped(sample)]
            try:
                answers = _checked(await function(sample, self.context), sample)
                for answer in answers:
                    await self._run_hook(answer)
            except Exception as error:  # policy: a failed sample is data
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                logger.info("sample %d failed: %s", sample.index, reason, exc_info=True)
                sample.restart()
                continue
            if self.context.gate.is_closed or all(a.status.is_finished for a in answers):
                for answer in answers:
                    answer.timing["generate_s"] = time.monotonic() - started
                return answers
            is_left = any(a.status is Status.PENDING for a in answers)
            reason = "left pending by the generate function" if is_left else "aborted by the engine"
            if is_left or len(answers) > 1:
                sample.restart()
        sample.fail(f"generate: {reason}")
        return [sample]

    def _generate_function(self, sample: Sample) -> Generate:
        if sample.generate_function is None:
            return self.generate
        return self.overrides[sample.generate_function]

    async def _run_hook(self, answer: Sample) -> None:
        if self.sample_hook is None or not answer.status.is_finished:
            return
        pending = self.sample_hook(answer)
        if inspect.isawaitable(pending):
            await pending

    async def _judge(self, sample: Sample) -> None:
        """Judge one answer, unless it has a reward, is unfinished, or its group is judged whole."""
        is_due = sample.status in (Status.COMPLETED, Status.TRUNCATED) and sample.reward is None
        if self.reward.per_group or not is_due:
            return
        outcome = await self._unless_closed(self.judge.judge(sample))
        if outcome is not None:
            self._apply(sample, outcome)

    async def _judge_group(self, group: Group) -> None:
        due = [s for s in group.samples if s.status is not Status.FAILED]
        if not due or all(sample.reward is not None for sample in due):
            return
        outcomes = await self._unless_closed(self.judge.judge_group(due))
        if outcomes is not None:
            for sample, outcome in zip(due, outcomes, strict=True):
                self._apply(sample, outcome)

    def _apply(self, sample: Sample, outcome: Outcome) -> None:
        sample.timing["reward_s"] = outcome.seconds
        apply_outcome(sample, outcome, self.reward)

    async def _unless_closed(self, work: Awaitable[T]) -> T | None:
        try:
            return await self.context.gate.unless_closed(work)
        except GateClosed:
            return None


def _stopped(sample: Sample) -> Sample:
    if sample.status is Status.PENDING and sample.segments:
        sample.status = Status.ABORTED
    return sample


def _checked(answer: object, sample: Sample) -> list[Sample]:
    """What a generate function returned, as a list of samples of the same attempt."""
    given = answer if isinstance(answer, list) else [answer]
    answers = [each for each in given if isinstance(each, Sample)]
    if not answers or len(answers) != len(given):
        raise TypeError(
            f"the generate function returned {type(answer).__name__}; expected the sample or a "
            "non-empty list of samples"
        )
    if any((a.group_index, a.attempt) != (sample.group_index, sample.attempt) for a in answers):
        raise ValueError("the generate function changed group_index or attempt of a sample")
    if len({a.index for a in answers}) != len(answers):
        raise ValueError("the generate function returned one index twice; use context.sibling")
    return answers
