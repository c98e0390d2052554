"""Engines, tokenizer and samples without a model, for tests of functions and of rollmill itself."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.config.sampling import SamplingConfig
from rollmill.engine.types import FinishReason, GenerateResult, VersionSpan
from rollmill.rollout.gate import Gate
from rollmill.rollout.generate import GenerateContext
from rollmill.sample import EngineCounters, Group, Sample, Segment, Status, float_array, int_array

END_OF_SEQUENCE = 2
FIRST_TOKEN = 3
VOCABULARY = 1000


class FakeTokenizer:
    """Token 17 is the text `t17`; texts are split at spaces."""

    chat_template: Any = None

    def __call__(self, text: list[str], **_: Any) -> dict[str, list[list[int]]]:
        """`input_ids` of each text."""
        return {"input_ids": [[self._id(word) for word in each.split()] for each in text]}

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> str:
        """The contents of the messages, with spaces between them."""
        return " ".join(str(message["content"]) for message in conversation)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """`t17 t18 …`; the end of sequence is a special token."""
        kept = [t for t in token_ids if not (skip_special_tokens and t == END_OF_SEQUENCE)]
        return " ".join(f"t{token}" for token in kept)

    @staticmethod
    def _id(word: str) -> int:
        if word[:1] == "t" and word[1:].isdecimal():
            return int(word[1:]) % VOCABULARY
        return FIRST_TOKEN + sum(map(ord, word)) % (VOCABULARY - FIRST_TOKEN)


@dataclass(frozen=True)
class FakeCall:
    """One engine call as it arrived."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: dict[str, Any]


class FakeEngines:
    """Engines that make answers up; what rollouts need of an engine pool.

    Answers depend on the sampling seed (or the request id) and the context alone. Attributes are
    plain: tests read and set them.

    Args:
        length: tokens of an answer (the last one ends the sequence), or a function of the call.
        version: weights that answers are written by.

    Attributes:
        calls: every call, in order.
        is_held: calls wait until `release`; an abort makes them return what there is.
        fault: called with each call; may raise what an engine would.
        num_running: calls without an answer yet.
    """

    def __init__(self, length: int | Callable[[FakeCall], int] = 6, version: int = 0) -> None:
        self.length = length
        self.version = version
        self.calls: list[FakeCall] = []
        self.is_held = False
        self.fault: Callable[[FakeCall], None] = lambda _: None
        self.num_running = 0
        self._changed = asyncio.Event()
        self._num_aborts = 0

    async def generate(
        self,
        rid: str,
        input_ids: npt.ArrayLike,
        sampling: dict[str, Any],
        *,
        session_id: str | None = None,
    ) -> GenerateResult:
        """One answer, at once unless held; half of it when aborted while held."""
        call = FakeCall(rid, tuple(int_array(input_ids).tolist()), dict(sampling))
        self.calls.append(call)
        self.num_running += 1
        aborts = self._num_aborts
        self._notify()
        try:
            await asyncio.sleep(0)
            self.fault(call)
            while self.is_held and aborts == self._num_aborts:
                await self._changed.wait()
            return self._answer(call, is_aborted=aborts != self._num_aborts)
        finally:
            self.num_running -= 1
            self._notify()

    async def abort_all(self, deadline_s: float) -> None:
        """End every call that waits."""
        self._num_aborts += 1
        self._notify()

    def hold(self) -> None:
        """Let calls wait."""
        self.is_held = True

    def release(self) -> None:
        """Answer the calls that wait."""
        self.is_held = False
        self._notify()

    async def wait_for_calls(self, number: int) -> None:
        """Return when `number` calls wait for their answers."""
        while self.num_running < number:
            await self._changed.wait()

    def _answer(self, call: FakeCall, *, is_aborted: bool) -> GenerateResult:
        limit = int(call.sampling["max_new_tokens"])
        wanted = self.length if isinstance(self.length, int) else self.length(call)
        seed = call.sampling.get("sampling_seed", call.rid)
        draw = random.Random(f"{seed}|{call.input_ids}")
        tokens = [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(min(wanted, limit))]
        finish = FinishReason.LENGTH
        if wanted <= limit:
            finish = FinishReason.STOP
            tokens[-1:] = [END_OF_SEQUENCE]
        if is_aborted:
            tokens, finish = tokens[: len(tokens) // 2], FinishReason.ABORT
        return GenerateResult(
            token_ids=int_array(tokens),
            log_probs=float_array([log_prob_of(token) for token in tokens]),
            spans=(VersionSpan(self.version, 0, len(tokens)),) if tokens else (),
            finish=finish,
            text=FakeTokenizer().decode(tokens, skip_special_tokens=True),
            counters=EngineCounters(num_calls=1, prompt_tokens=len(call.input_ids)),
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def log_prob_of(token: int) -> float:
    """The log-prob that fake engines give a token: a function of the token alone."""
    return -((token % 97) + 1) / 100.0


def make_context(
    engines: Any = None,
    *,
    sampling: SamplingConfig | None = None,
    context_length: int = 512,
    seed: int | None = 0,
    max_requests: int = 64,
    scope: str = "train",
) -> GenerateContext:
    """A context for generate functions, over `FakeEngines` unless others are given."""
    return GenerateContext(
        engines=engines if engines is not None else FakeEngines(),
        gate=Gate(max_requests),
        tokenizer=FakeTokenizer(),
        sampling=sampling or SamplingConfig(max_new_tokens=64),
        context_length=context_length,
        seed=seed,
        step=1,
        scope=scope,
        new_index=itertools.count(1_000_000).__next__,
    )


def make_sample(index: int = 0, *, group_index: int = 0, attempt: int = 0, **fields: Any) -> Sample:
    """A fresh sample with a prompt of 4 tokens; any field by name."""
    prompt = int_array([10, 11, 12, 13 + group_index % 100])
    values = {"prompt": "t10 t11 t12", "label": "t17", "metadata": {"id": group_index}} | fields
    return Sample(prompt, index=index, group_index=group_index, attempt=attempt, **values)


def make_group(
    group_index: int = 0,
    rewards: Sequence[float | None] = (0.0, 1.0),
    *,
    length: int = 5,
    version: int = 0,
) -> Group:
    """A group with one COMPLETED, judged sample per reward; None makes a FAILED one."""
    samples = []
    for attempt, reward in enumerate(rewards):
        sample = make_sample(
            group_index * len(rewards) + attempt, group_index=group_index, attempt=attempt
        )
        if reward is None:
            sample.fail("made up")
        else:
            tokens = np.arange(FIRST_TOKEN, FIRST_TOKEN + length)
            log_probs = [log_prob_of(int(token)) for token in tokens]
            sample.segments = [Segment.from_engine(tokens, log_probs, version)]
            sample.response = FakeTokenizer().decode(tokens.tolist())
            sample.status, sample.reward, sample.reward_outcome = Status.COMPLETED, reward, "value"
        samples.append(sample)
    return Group(group_index, samples)


def make_batch(num_groups: int = 4) -> list[Group]:
    """Groups with different rewards; in the last one, one sample FAILED."""
    groups = [make_group(i, (0.0, 1.0, float(i % 2))) for i in range(num_groups)]
    groups[-1] = make_group(num_groups - 1, (1.0, None, 0.0))
    return groups
