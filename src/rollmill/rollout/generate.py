"""Writing one answer: the context that generate functions work in, and the built-in one.

A generate function gets a sample and a `GenerateContext` and returns the sample (or, with
fan-out, several). It never sees another sample's settings: sampling parameters are frozen values,
and limits are computed for each call from what the sample already holds.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollmill.config.sampling import SamplingConfig
from rollmill.data.template import Tokenizer
from rollmill.engine.types import FinishReason, GenerateResult
from rollmill.rollout.gate import Gate, GateClosed
from rollmill.rollout.seeds import call_seed
from rollmill.sample import EngineCounters, Sample, Segment, Status


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
        """Write the answer; return the sample, or several with the same group and attempt."""


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
    _request_numbers: itertools.count[int]

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
        sampling = self.sampling.to_wire(max_new_tokens=max_new_tokens, seed=seed)
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
        return result

    def sibling(self, sample: Sample) -> Sample:
        """A new sample of the same attempt (fan-out): same prompt, nothing generated."""
        twin = copy.copy(sample)
        twin.metadata = copy.deepcopy(sample.metadata)
        twin.restart()
        twin.index = self.new_index()
        return twin

    def append_environment(self, sample: Sample, token_ids: npt.ArrayLike) -> None:
        """Append tokens that a tool or user wrote: part of the context, never of the loss."""
        sample.segments.append(Segment.from_environment(token_ids))

    def _append(self, sample: Sample, result: GenerateResult) -> None:
        is_continued = bool(sample.segments)
        sample.segments.extend(result.to_segments())
        sample.status = STATUS_AFTER[result.finish]
        if result.routed_experts is not None:
            sample.routed_experts = result.routed_experts
        if result.text and not is_continued:
            sample.response = result.text
        else:
            sample.response = self.text_of(sample)

    def text_of(self, sample: Sample) -> str:
        """The response as text, decoded whole; a stop string at its end is cut off."""
        text = self.tokenizer.decode(
            sample.response_tokens.tolist(), skip_special_tokens=self.sampling.skip_special_tokens
        )
        if sample.status is Status.COMPLETED:
            return cut_stop(str(text), self.sampling.stop)
        return str(text)


async def generate_single_turn(sample: Sample, context: GenerateContext) -> Sample:
    """The built-in generate function: one engine call from where the sample is."""
    return await context.extend(sample)


def cut_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    positions = [position for stop in stops if stop and (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


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


def response_versions(sample: Sample) -> list[int]:
    """Distinct weight versions of the sample's trainable tokens, ascending."""
    versions = sample.weight_versions[sample.loss_mask]
    return [int(v) for v in np.unique(versions)]
