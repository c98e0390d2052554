"""Writing one answer: the context that generate functions work in, and the built-in one.

A generate function gets a sample and a `GenerateContext` and returns the sample (or, with
fan-out, several). It never sees another sample's settings: sampling parameters are frozen values,
and limits are computed for each call from what the sample already holds.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from rollmill.config.sampling import SamplingConfig
from rollmill.data.template import Tokenizer
from rollmill.engine.types import FinishReason, GenerateResult
from rollmill.errors import RolloutError
from rollmill.rollout.gate import Gate, GateClosed
from rollmill.rollout.seeds import NUM_SIBLINGS_KEY, SIBLING_KEY, call_seed
from rollmill.rollout.usage import Loss, Usage
from rollmill.sample import EngineCounters, Sample, Segment, Status

T = TypeVar("T")


class Engines(Protocol):
    """What rollouts need of the engines: `EnginePool` is one."""

    async def generate(
        self,
        rid: str,
        input_ids: npt.ArrayLike,
        sampling: dict[str, Any],
        *,
        session_id: str | None = None,
    ) -> GenerateResult:
        """One engine call."""

    async def abort_all(self, deadline_s: float) -> object:
        """Stop every request on every engine; partial answers come back through `generate`."""


class Generate(Protocol):
    """The generate hook."""

    async def __call__(self, sample: Sample, context: GenerateContext) -> Sample | list[Sample]:
        """Write the answer; return the sample, or several with the same group and attempt.

        A sample that comes with segments was returned unfinished (ABORTED) by an earlier call,
        alone or as one of several: go on from it. What is returned takes its place.
        """


STATUS_AFTER = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.TRUNCATED,
    FinishReason.ABORT: Status.ABORTED,
}


@dataclass(frozen=True)
class GenerateContext:
    """What a generate function may use.

    Attributes:
        engines: the engine pool.
        gate: limits requests; closed while a batch is being aborted.
        tokenizer: the model's tokenizer.
        sampling: how tokens are chosen; frozen.
        context_length: most tokens of prompt and response together.
        seed: the run's seed, or None when sampling need not be reproducible.
        step: the training step; in evaluation, the step whose weights are evaluated.
        scope: `train`, or `eval/NAME`.
        new_index: a fresh sample index, for fan-out siblings.
        usage: counts the tokens that engines write.
    """

    engines: Engines
    gate: Gate
    tokenizer: Tokenizer
    sampling: SamplingConfig
    context_length: int
    seed: int | None
    step: int
    scope: str
    new_index: Callable[[], int]
    usage: Usage = field(default_factory=Usage)
    _request_numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def is_evaluation(self) -> bool:
        """True when the samples are for evaluation only."""
        return self.scope != "train"

    def with_sampling(self, **changes: Any) -> GenerateContext:
        """The same context with other sampling parameters; nobody else sees the change."""
        changed = SamplingConfig.model_validate({**self.sampling.model_dump(), **changes})
        return replace(self, sampling=changed)

    def budget(self, sample: Sample) -> int:
        """Tokens the next call may write: within max_new_tokens and the context length."""
        left = self.sampling.max_new_tokens - sample.response_length
        room = self.context_length - len(sample.prompt_tokens) - sample.response_length
        return min(left, room)

    async def extend(self, sample: Sample, max_new_tokens: int | None = None) -> Sample:
        """One engine call that goes on from the sample's tokens, appended to it as segments.

        Sets the status: COMPLETED (stopped), TRUNCATED (no tokens left, also before the call),
        ABORTED (the batch is being aborted; what was written is kept).

        Args:
            sample: continued in place; its prompt and segments are the context.
            max_new_tokens: a lower limit for this call than the sampling parameters give.

        Raises:
            EngineError: the engine failed or answered nonsense.
        """
        budget = self.budget(sample)
        if max_new_tokens is not None:
            budget = min(budget, max_new_tokens)
        if budget <= 0:
            sample.status = Status.TRUNCATED
            return sample
        result = await self.call(sample, sample.tokens, budget)
        self._append(sample, result)
        return sample

    async def call(
        self, sample: Sample, token_ids: npt.ArrayLike, max_new_tokens: int
    ) -> GenerateResult:
        """One engine call with any context, on behalf of `sample`; nothing is appended."""
        number = sample.counters.num_calls
        seed = None if self.seed is None else call_seed(self.seed, sample, number, self.scope)
        sampling = self.sampling.to_wire(
            max_new_tokens=max_new_tokens, num_before=sample.response_length, seed=seed
        )
        rid = f"{self.scope}/{sample.index}/{next(self._request_numbers)}"
        try:
            async with self.gate:
                result = await self.engines.generate(
                    rid,
                    token_ids,
                    sampling,
                    session_id=sample.session_id or f"{self.scope}/{sample.group_index}",
                )
        except GateClosed:
            return GenerateResult.aborted_before_start()
        add_counters(sample.counters, result.counters)
        self.usage.num_generated += result.num_tokens
        return result

    async def wait_for(self, work: Awaitable[T]) -> T:
        """The result of `work` (a tool, a sandbox), given up at once when the batch is aborted.

        Raises:
            GateClosed: the batch is being aborted. Let it pass: the sample is kept as ABORTED.
        """
        return await self.gate.unless_closed(work)

    def sibling(self, sample: Sample) -> Sample:
        """A new sample of the same attempt (fan-out): same prompt, nothing generated."""
        number = sample.metadata.get(NUM_SIBLINGS_KEY, 0) + 1
        sample.metadata[NUM_SIBLINGS_KEY] = number
        twin = copy.copy(sample)
        twin.metadata = copy.deepcopy(sample.metadata)
        del twin.metadata[NUM_SIBLINGS_KEY]
        twin.metadata[SIBLING_KEY] = f"{sample.metadata.get(SIBLING_KEY, '')}.{number}"
        twin.restart()
        twin.index = self.new_index()
        return twin

    def append_environment(self, sample: Sample, token_ids: npt.ArrayLike) -> None:
        """Append tokens that a tool or user wrote: part of the context, never of the loss."""
        sample.segments.append(Segment.from_environment(token_ids))

    def _append(self, sample: Sample, result: GenerateResult) -> None:
        num_before = sample.response_length
        is_cut = sample.status is Status.ABORTED and was_writing(sample)
        sample.segments.extend(result.to_segments())
        sample.status = STATUS_AFTER[result.finish]
        if result.routed_experts is not None:
            sample.routed_experts = result.routed_experts
        if is_cut and self.sampling.stop:
            self._end_at_stop(sample, num_before)
        if num_before or not result.text:
            sample.response = self.text_of(sample, num_before)
        else:
            sample.response = result.text

    def _end_at_stop(self, sample: Sample, num_before: int) -> None:
        """End an answer at a stop string that began before it was cut off and ends after.

        The engine that went on looked for stop strings in its own tokens only.
        """
        tokens = sample.response_tokens.tolist()
        start = len(self._decode(tokens[:num_before]))
        reach = max(map(len, self.sampling.stop))
        for length in range(num_before + 1, min(len(tokens), num_before + reach) + 1):
            text = self._decode(tokens[:length])
            if straddles(text, self.sampling.stop, start):
                self.usage.lost[Loss.ABORTED] += len(tokens) - length
                keep_tokens(sample, length)
                sample.status = Status.COMPLETED
                return

    def text_of(self, sample: Sample, num_before: int = 0) -> str:
        """The response as text, decoded whole, without the stop string or token that ended it.

        Args:
            sample: whose response.
            num_before: response tokens before the last call, in which stop strings are no stops
                (earlier turns end with them).
        """
        tokens = sample.response_tokens.tolist()
        if sample.status is not Status.COMPLETED:
            return self._decode(tokens)
        if tokens and self._is_end(tokens[-1]):
            return self._decode(tokens[:-1])
        if not self.sampling.stop:
            return self._decode(tokens)
        num_chars_before = len(self._decode(tokens[:num_before]))
        return cut_stop(self._decode(tokens), self.sampling.stop, num_chars_before)

    def _is_end(self, token: int) -> bool:
        """Whether an answer ends at this token: engines leave it out of the text as well."""
        is_special = token in getattr(self.tokenizer, "all_special_ids", ())
        return token in self.sampling.stop_token_ids or (
            is_special and not self.sampling.ignore_eos
        )

    def _decode(self, token_ids: list[int]) -> str:
        is_skipped = self.sampling.skip_special_tokens
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=is_skipped))


async def generate_single_turn(sample: Sample, context: GenerateContext) -> Sample:
    """The built-in generate function: one engine call from where the sample is.

    Raises:
        RolloutError: the prompt has images, which would be left out silently.
    """
    if sample.multimodal_inputs:
        raise RolloutError(
            "the prompt has images, and the built-in generate function sends tokens only",
            where=f"sample {sample.index}",
            fix="set data.images_key to null to leave images out, or rollout.hooks.generate to a "
            "function that sends them",
        )
    return await context.extend(sample)


def checked_answers(answer: object, sample: Sample) -> list[Sample]:
    """What a generate function returned, as a list of samples of the same attempt.

    Raises:
        TypeError, ValueError: it is something else.
    """
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


def cut_stop(text: str, stops: Sequence[str], start: int = 0) -> str:
    """`text` up to the first stop string that ends after position `start`."""
    positions = [
        position
        for stop in stops
        if stop and (position := text.find(stop, max(0, start - len(stop) + 1))) >= 0
    ]
    return text[: min(positions)] if positions else text


def straddles(text: str, stops: Sequence[str], place: int) -> bool:
    """Whether one of the stop strings begins before `place` in `text` and ends behind it."""
    return any(
        0 <= text.find(stop, max(0, place - len(stop) + 1), place + len(stop) - 1) < place
        for stop in stops
        if stop
    )


def was_writing(sample: Sample) -> bool:
    """Whether the engine wrote the last tokens of a response, not a tool or a user."""
    written = [segment for segment in sample.segments if len(segment)]
    return bool(written) and written[-1].source == "engine"


def keep_tokens(sample: Sample, length: int) -> None:
    """Cut a response to its first `length` tokens."""
    kept, place = [], 0
    for segment in sample.segments:
        left = length - place
        place += len(segment)
        if left > 0:
            kept.append(segment.first(left))
    sample.segments = kept
    if sample.routed_experts is not None:
        sample.routed_experts = sample.routed_experts[: len(sample.prompt_tokens) + length - 1]


def add_counters(total: EngineCounters, more: EngineCounters) -> None:
    """Add what one call cost to a sample's counters."""
    for counter in fields(EngineCounters):
        value = getattr(total, counter.name) + getattr(more, counter.name)
        setattr(total, counter.name, value)


def mask_older_than(sample: Sample, version: int) -> int:
    """Take tokens of weights older than `version` out of the loss; the number taken out."""
    masked = 0
    for number, segment in enumerate(sample.segments):
        is_old = segment.weight_version is not None and segment.weight_version < version
        if segment.trainable and is_old:
            sample.segments[number] = segment.untrainable()
            masked += len(segment)
    return masked
