"""One group from prompt to judged answers: n attempts at once, each with its own fate.

A failure in one attempt (the engine, a hook, a grader) ends as that sample's status and reason and
never leaves this module as an exception. An attempt that failed for good can make the others
worthless: then they end at once. When the gate closes, everything here ends at once:
requests come back with what they have, graders of answers that no batch waits for are cancelled.
No task outlives `run`, and at every moment `Group.samples` can be restored from what is there.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollmill.config.reward import RewardConfig
from rollmill.errors import HookError
from rollmill.rewards.inputs import checked_reward
from rollmill.rewards.outcome import Outcome, OutcomeKind, apply_outcome
from rollmill.rollout.fresh import NOT_TAUGHT, afresh, is_taught
from rollmill.rollout.gate import GateClosed, is_being_cancelled
from rollmill.rollout.generate import Generate, GenerateContext, checked_answers
from rollmill.rollout.usage import Loss
from rollmill.sample import Group, Sample, Status
from rollmill.sample_rows import to_json

logger = logging.getLogger(__name__)
SampleHook = Callable[[Sample], "Awaitable[None] | None"]
Overrides = Callable[[str], Generate]


class Grader(Protocol):
    """What rollouts need of the judge: `Judge` is one."""

    async def judge(self, sample: Sample) -> Outcome:
        """The outcome for one sample."""

    async def judge_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes for all answers to a prompt, in their order."""


class Teacher(Protocol):
    """What rollouts need of a teacher: `Teachers` is one."""

    async def score(self, sample: Sample) -> None:
        """Set `teacher_log_probs`: one per response token."""


@dataclass(frozen=True)
class GroupRunner:
    """Runs groups; one for training and one per evaluation set.

    Attributes:
        generate: the run's generate function.
        overrides: finds the function that a sample names (`Sample.generate_function`); raises
            HookError when there is none.
        context: what generate functions get.
        judge: gives the rewards.
        reward: how outcomes become numbers.
        max_retries: fresh tries of a failed sample before it is FAILED.
        sample_hook: runs on each answer between generation and reward.
        ends_on_failure: a FAILED sample ends its group at once, because nobody would use it.
        teacher: scores each answer as soon as it is finished, while it is judged and others are
            still being written.
    """

    generate: Generate
    overrides: Overrides
    context: GenerateContext
    judge: Grader
    reward: RewardConfig
    max_retries: int
    sample_hook: SampleHook | None = None
    ends_on_failure: bool = False
    teacher: Teacher | None = None

    def at_step(self, step: int, *, ends_on_failure: bool = False) -> GroupRunner:
        """The same runner, whose generate functions see this training step."""
        context = replace(self.context, step=step)
        return replace(self, context=context, ends_on_failure=ends_on_failure)

    async def run(self, group: Group) -> Group:
        """Finish the group in place, as far as the gate allows.

        Afterwards every sample is finished and judged, or FAILED with its reason, or (the gate
        closed, the caller was cancelled, or another sample's failure ended the group) PENDING or
        ABORTED with the tokens it has, or finished and not judged.
        """
        answers = group.attempts()
        try:
            if len(answers) == 1:
                await self._attempt(answers, 0)
            else:
                async with asyncio.TaskGroup() as tasks:
                    for place in range(len(answers)):
                        tasks.create_task(self._attempt(answers, place))
        except* _GroupLost:
            logger.debug("group %d: its other attempts were ended", group.group_index)
        finally:
            group.samples = [sample for samples in answers for sample in samples]
        if self.reward.per_group and group.is_finished:
            await self._judge_group(group)
        return group

    async def _attempt(self, answers: list[list[Sample]], place: int) -> None:
        """Generate and judge the samples of `answers[place]`, which is kept up to date.

        Raises:
            _GroupLost: one of them failed, and nobody will use the group.
        """
        await self._answer(answers, place)
        if self.ends_on_failure and any(s.status is Status.FAILED for s in answers[place]):
            raise _GroupLost

    async def _answer(self, answers: list[list[Sample]], place: int) -> None:
        given = answers[place]
        for number, sample in enumerate(given):
            if not sample.status.is_finished:
                written = await self._generate(sample)
                rest = given[number + 1 :]
                done = answers[place][: len(answers[place]) - len(rest) - 1]
                answers[place] = [*done, *written, *rest]
        work = [self._judge(sample) for sample in answers[place] if self._is_due(sample)]
        work += [self._teach(sample) for sample in answers[place] if self._is_untaught(sample)]
        if len(work) == 1:
            await work[0]
        elif work:
            async with asyncio.TaskGroup() as tasks:
                for each in work:
                    tasks.create_task(each)

    # -- generation ------------------------------------------------------------------------------

    async def _generate(self, sample: Sample) -> list[Sample]:
        """The finished samples that take the place of one; fresh tries after failures."""
        try:
            function = self._function(sample)
        except HookError as error:  # found in a data row or set by user code: costs its sample
            sample.fail(f"generate_function: {error.what} ({error.found})")
            return [sample]
        given = copy.copy(sample)  # user code may change what it gets, its prompt too
        given.metadata = copy.deepcopy(sample.metadata)
        reason = "no attempt was made"
        num_tries = 0
        while num_tries <= self.max_retries:
            if self.context.gate.is_closed:
                return [_stopped(sample)]
            num_before = sample.response_length
            written, reason = await self._try(function, sample)
            if not reason or (written and self.context.gate.is_closed):
                return [_stopped(answer) for answer in written]
            if len(written) == 1 and written[0].status is Status.ABORTED:
                sample = written[0]  # aborted by the engine: go on from its tokens
                num_tries += sample.response_length <= num_before
                continue
            num_tries += 1
            self.context.usage.lose(Loss.RETRIED, written or [sample])
            sample = afresh(given)
            sample.metadata = copy.deepcopy(given.metadata)
        if (
            not self.context.gate.is_closed
        ):  # what fails while a batch ends has its tries in the next
            sample.fail(f"generate: {reason}")
        return [sample]

    def _function(self, sample: Sample) -> Generate:
        name = sample.generate_function
        return self.generate if name is None else self.overrides(name)

    async def _try(self, function: Generate, sample: Sample) -> tuple[list[Sample], str]:
        """What one call of the generate function wrote, and why that will not do ("" when it will).

        Policy: whatever user code raises is data, a stray CancelledError or SystemExit too; only
        the cancellation of this very task passes, and the sample is then ABORTED.
        """
        started = time.monotonic()
        try:
            written = checked_answers(await function(sample, self.context), sample)
            for answer in written:
                await self._run_hook(answer)
                to_json(answer.metadata, f"sample {answer.index}", "metadata")  # or it fails here
        except GateClosed:
            return [_unfinished(sample)], "the batch was aborted"
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                _unfinished(sample)
                raise
            return [], self._told(sample, error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - policy above
            return [], self._told(sample, error)
        for answer in written:
            spent = answer.timing.get("generate_s", 0.0) + time.monotonic() - started
            answer.timing["generate_s"] = spent
        return written, _why_unfinished(written)

    def _told(self, sample: Sample, error: BaseException) -> str:
        logger.info("sample %d failed: %r", sample.index, error, exc_info=error)
        return first_line(error)

    async def _run_hook(self, answer: Sample) -> None:
        is_answer = answer.status in (Status.COMPLETED, Status.TRUNCATED)
        if self.sample_hook is None or not is_answer:
            return
        pending = self.sample_hook(answer)
        if inspect.isawaitable(pending):
            await pending

    # -- teacher ---------------------------------------------------------------------------------

    def _is_untaught(self, sample: Sample) -> bool:
        is_answer = sample.status in (Status.COMPLETED, Status.TRUNCATED)
        return self.teacher is not None and is_answer and not is_taught(sample)

    async def _teach(self, sample: Sample) -> None:
        """Have the teacher score a finished answer; when the gate closes first, it is not done.

        Policy: as for generate functions, whatever the teacher raises is data.
        """
        if self.teacher is None:
            return
        sample.teacher_log_probs = NOT_TAUGHT
        try:
            await self.context.gate.unless_closed(self.teacher.score(sample))
        except GateClosed:
            return
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            sample.fail(f"teacher: {first_line(error)}")
        except Exception as error:  # noqa: BLE001 - policy above
            logger.warning("scoring sample %d failed: %r", sample.index, error)
            sample.fail(f"teacher: {first_line(error)}")

    # -- rewards ---------------------------------------------------------------------------------

    def _is_due(self, sample: Sample) -> bool:
        """Whether the sample is to be judged now; a reward that user code set is checked."""
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            return False
        if sample.reward is not None:
            if sample.reward_outcome is None:
                self._accept_given(sample)
            return False
        return not self.reward.per_group

    def _accept_given(self, sample: Sample) -> None:
        """A reward that the generate function or the sample hook set counts as a judged one."""
        try:
            value = checked_reward(sample.reward)
        except ValueError as error:
            sample.reward = None
            sample.fail(f"reward set by the generate function: {error}")
            return
        detail = sample.reward_detail
        apply_outcome(sample, Outcome(OutcomeKind.VALUE, value), self.reward)
        sample.reward_detail = detail

    async def _judge(self, sample: Sample) -> None:
        outcomes = await self._judged([sample], lambda: self._judge_one(sample))
        if outcomes:
            self._apply(sample, outcomes[0])

    async def _judge_one(self, sample: Sample) -> list[Outcome]:
        return [await self.judge.judge(sample)]

    async def _judge_group(self, group: Group) -> None:
        """Judge all answers together; a reward that user code set stays what it is."""
        due = [sample for sample in group.samples if sample.status is not Status.FAILED]
        if not due or all(sample.reward is not None for sample in due):
            return
        outcomes = await self._judged(due, lambda: self.judge.judge_group(due))
        for sample, outcome in zip(due, outcomes, strict=True) if outcomes else ():
            if sample.reward is None:
                self._apply(sample, outcome)

    async def _judged(
        self, due: list[Sample], judge: Callable[[], Awaitable[list[Outcome]]]
    ) -> list[Outcome]:
        """One outcome per sample; none when the gate closed or judging broke (they are FAILED).

        Policy: as for generate functions, whatever the judge raises is data.
        """
        try:
            outcomes = await self.context.gate.unless_closed(judge())
            if len(outcomes) != len(due):
                raise ValueError(f"expected {len(due)} outcomes, found {len(outcomes)}")
            return outcomes
        except GateClosed:
            return []
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            reason: Any = error
        except Exception as error:  # noqa: BLE001 - policy above
            reason = error
        logger.warning("judging sample %d failed: %r", due[0].index, reason, exc_info=reason)
        for sample in due:
            sample.reward = None
            sample.fail(f"reward: {first_line(reason)}")
        return []

    def _apply(self, sample: Sample, outcome: Outcome) -> None:
        sample.timing["reward_s"] = outcome.seconds
        sample.metadata.pop("reward_parts", None)  # of the data's own, or of an answer given up
        apply_outcome(sample, outcome, self.reward)


class _GroupLost(Exception):
    """An attempt failed for good: a signal that ends the attempts beside it."""


def first_line(error: BaseException) -> str:
    """An error as one line: its kind and the beginning of its message."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]


def _stopped(sample: Sample) -> Sample:
    """A sample that nobody works on any more: with tokens it is ABORTED, not PENDING."""
    if sample.status is Status.PENDING and sample.segments:
        sample.status = Status.ABORTED
    return sample


def _unfinished(sample: Sample) -> Sample:
    """A sample whose generate function was stopped half way: whatever it had set is not final."""
    sample.status = Status.ABORTED if sample.segments else Status.PENDING
    return sample


def _why_unfinished(written: Sequence[Sample]) -> str:
    if any(answer.status is Status.PENDING for answer in written):
        return "left pending by the generate function"
    if any(answer.status is Status.ABORTED for answer in written):
        return "aborted by the engine"
    return ""
