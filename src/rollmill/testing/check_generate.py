"""The contract of generate functions, situation by situation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rollmill.config.sampling import SamplingConfig
from rollmill.errors import HookError
from rollmill.rollout.gate import GateClosed
from rollmill.rollout.generate import Generate, GenerateContext
from rollmill.sample import Sample, Status
from rollmill.testing.fakes import FakeEngines, log_prob_of, make_context, make_sample

NUM_AT_ONCE = 8


async def check_generate_function(function: Generate, *, where: str) -> None:
    """Run `function` in every situation.

    Raises:
        HookError: what it returned breaks the contract.
    """
    check = _Check(function, where)
    await check.alone()
    await check.at_once()
    await check.short_of_tokens()
    await check.aborted_and_continued()


class _Check:
    def __init__(self, function: Generate, where: str) -> None:
        self._function = function
        self._where = where

    async def alone(self) -> None:
        """One sample with room enough: finished, and made of what the engine wrote."""
        context = make_context(context_length=4096, sampling=SamplingConfig(max_new_tokens=1024))
        sample = make_sample(7, group_index=3, attempt=2)
        answers = await self._call(sample, context)
        self._expect_finished(answers, "alone")
        if not any(answer.loss_mask.any() for answer in answers):
            raise self._broken("some tokens can be trained on", "none", "alone")

    async def at_once(self) -> None:
        """Many samples at once get what each gets alone: nothing is shared between calls."""
        expected = {}
        for number in range(NUM_AT_ONCE):
            sample = make_sample(number, group_index=number)
            answers = await self._call(sample, make_context())
            expected[number] = [answer.tokens.tolist() for answer in answers]
        context = make_context()
        samples = [make_sample(number, group_index=number) for number in range(NUM_AT_ONCE)]
        together = await asyncio.gather(*(self._call(sample, context) for sample in samples))
        for number, answers in enumerate(together):
            found = [answer.tokens.tolist() for answer in answers]
            if found != expected[number]:
                raise self._broken(
                    "the tokens that the sample gets alone", "others", "many samples at once"
                )

    async def short_of_tokens(self) -> None:
        """Limits are kept, however small."""
        for limit, room in ((1, 64), (5, 64), (64, 9)):
            sampling = SamplingConfig(max_new_tokens=limit)
            context = make_context(FakeEngines(40), sampling=sampling, context_length=room)
            answers = await self._call(make_sample(), context)
            self._expect_finished(answers, f"max_new_tokens {limit}, context of {room} tokens")
            for answer in answers:
                if len(answer.tokens) > room:
                    raise self._broken(
                        f"at most {room} tokens of prompt and response",
                        str(len(answer.tokens)),
                        "a small context",
                    )

    async def aborted_and_continued(self) -> None:
        """An abort ends it promptly, with the tokens so far; another call goes on from them."""
        engines = FakeEngines(12)
        context = make_context(engines)
        engines.hold()
        task = asyncio.ensure_future(self._call(make_sample(), context))
        waiting = asyncio.ensure_future(engines.wait_for_calls(1))
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        context.gate.close()
        await engines.abort_all(1.0)
        try:
            answers = await task
        except GateClosed:
            return
        engines.release()
        context.gate.open()
        for answer in answers:
            if answer.status is Status.ABORTED:
                before = answer.tokens.tolist()
                continued = await self._call(answer, context)
                self._expect_finished(continued, "going on after an abort")
                if not any(c.tokens.tolist()[: len(before)] == before for c in continued):
                    raise self._broken(
                        "the tokens written before the abort, and more after them",
                        "other tokens",
                        "going on after an abort",
                    )

    async def _call(self, sample: Sample, context: GenerateContext) -> list[Sample]:
        """The answers, checked for what must hold whatever happened."""
        prompt, identity = sample.prompt_tokens, (sample.group_index, sample.attempt)
        given = await self._function(sample, context)
        answers = given if isinstance(given, list) else [given]
        if not answers or not all(isinstance(answer, Sample) for answer in answers):
            raise self._broken("the sample, or a list of samples", repr(given)[:100], "any")
        if {(a.group_index, a.attempt) for a in answers} != {identity}:
            raise self._broken("the group_index and attempt of the sample given", "others", "any")
        if len({a.index for a in answers}) != len(answers):
            raise self._broken(
                "an index of its own for each sample (context.sibling)", "the same", "fan-out"
            )
        if len(answers) == 1 and not np.array_equal(answers[0].prompt_tokens, prompt):
            raise self._broken("the prompt tokens as they were", "changed ones", "any")
        for answer in answers:
            self._expect_engine_log_probs(answer)
        return answers

    def _expect_engine_log_probs(self, answer: Sample) -> None:
        mask = answer.loss_mask
        found = answer.rollout_log_probs[mask]
        expected = [log_prob_of(int(token)) for token in answer.response_tokens[mask]]
        if not np.allclose(found, expected, atol=1e-6):
            raise self._broken(
                "trainable tokens with the log-probs that the engine gave them",
                "other tokens or log-probs",
                "any",
            )

    def _expect_finished(self, answers: Sequence[Sample], situation: str) -> None:
        states = [answer.status for answer in answers]
        if not all(state in (Status.COMPLETED, Status.TRUNCATED) for state in states):
            raise self._broken(
                "COMPLETED or TRUNCATED", ", ".join(s.value for s in states), situation
            )

    def _broken(self, expected: str, found: str, situation: str) -> HookError:
        return HookError(
            "the generate function does not keep its contract",
            where=f"{self._where} ({situation})",
            expected=expected,
            found=found,
        )
