"""Teachers: what they think of each token that the student wrote.

A teacher sees the prompt and the student's own answer as one input and writes nothing. Its log-prob
of response token i is the one at position P + i of the whole sequence, given everything before it;
the client checks that the ids that come back are those that were sent.

Invariant: after `score`, the sample has one teacher log-prob per response token, the loss mask
notwithstanding.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from rollmill.errors import RolloutError
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rollout.group import Grader
from rollmill.sample import FloatArray, Sample, float_array

TEACHER_KEY = "teacher"
"""Metadata of a row: the name of its teacher."""


def teacher_named(metadata: Mapping[str, Any]) -> Any:
    """What a row's metadata says about its teacher; `""` where it names none. In a table every
    row has every column: a null is no name."""
    name = metadata.get(TEACHER_KEY)
    return "" if name is None else name


class Scorer(Protocol):
    """What a teacher's engines must do: `EnginePool` does."""

    async def score(
        self, rid: str, input_ids: npt.ArrayLike, start: int, *, session_id: str | None = None
    ) -> FloatArray:
        """Log-probs of the given tokens from position `start` on, at temperature 1."""


class Teachers:
    """Scores samples with the teacher that each one's row names.

    Args:
        scorers: by name; `""` is the teacher of rows that name none.
    """

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = dict(scorers)
        self._numbers = itertools.count()

    def name_for(self, sample: Sample) -> str:
        """Which teacher a sample has.

        Raises:
            RolloutError: its row names one that is not configured, or none and there is no default.
        """
        name = teacher_named(sample.metadata)
        if isinstance(name, str) and name in self._scorers:
            return name
        raise RolloutError(
            f"no teacher for a row whose metadata.{TEACHER_KEY} is {name!r}",
            where=f"sample {sample.index}",
            expected=", ".join(map(repr, self._scorers)),
            fix="name one of opd.teachers in the row, or set opd.teacher for rows that name none",
        )

    async def score(self, sample: Sample) -> None:
        """Set the sample's `teacher_log_probs`.

        Raises:
            RolloutError: the sample's row names no known teacher, or it has images.
            EngineCallError: the teacher's engines failed or answered nonsense.
        """
        if sample.multimodal_inputs:
            raise RolloutError(
                "the prompt has images, and teachers are sent tokens only",
                where=f"sample {sample.index}",
                fix="distill on rows without images (data.images_key: null leaves them out)",
            )
        name = self.name_for(sample)
        start = len(sample.prompt_tokens)
        if sample.response_length == 0:
            sample.teacher_log_probs = float_array([])
            return
        sample.teacher_log_probs = await self._scorers[name].score(
            f"teacher/{sample.index}/{next(self._numbers)}",
            sample.tokens,
            start,
            session_id=f"teacher/{sample.group_index}",
        )


class ZeroReward:
    """A judge for runs whose only signal is the teacher: 0 for answers that name no reward.

    Args:
        judge: judges samples that name a reward themselves, or whose rows do.
    """

    def __init__(self, judge: Grader) -> None:
        self._judge = judge

    async def judge(self, sample: Sample) -> Outcome:
        """The outcome for one sample."""
        if sample.reward_function is None and sample.metadata.get("reward_type") is None:
            return Outcome(OutcomeKind.VALUE, 0.0)
        return await self._judge.judge(sample)

    async def judge_group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes for all answers to a prompt."""
        return list(await asyncio.gather(*map(self.judge, samples)))
