"""`rollmill distill prepare`: the student answers, student and teachers score, shards remain.

One shard of prompts at a time is in memory. Within it the phases follow each other, so that their
seconds mean something: all answers are sampled, then scored by the student, then by the teachers,
then the shard is written. A preparation that was killed goes on behind its last finished shard.
Because an answer's seed depends only on the run's seed, the prompt's place in the data set and the
attempt, it draws the answers that it would have drawn undisturbed. Log-probs are the same up to the
rounding of an engine that computes several requests at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollmill import __version__
from rollmill.data.prompts import PromptRow
from rollmill.distill.checks import Refusals, RowLimits
from rollmill.distill.manifest import (
    FILE_NAME,
    Manifest,
    Settings,
    ShardEntry,
    read_manifest,
    write_manifest,
)
from rollmill.distill.rows import RecordedRow
from rollmill.distill.shards import (
    ShardFacts,
    answers_in,
    check_shard,
    entry_of,
    facts_of,
    read_table,
    shard_name,
    write_shard,
)
from rollmill.errors import ConfigError, DataError, EngineError, first_error
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.teacher import Scorer, Teachers
from rollmill.sample import FloatArray, Sample, Status, float_array

logger = logging.getLogger(__name__)

SCOPE = "distill"
"""Random streams and request ids of prepared answers are apart from those of training."""


@dataclass(frozen=True)
class Progress:
    """How far a preparation is: `done` of `total` answers of a phase of a shard."""

    shard: int
    num_shards: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class PrepareParts:
    """What a preparation works with.

    Attributes:
        prompts: in data set order.
        context: how the student answers; its seed, sampling and context length are the settings'.
        student: scores the answers again, in the way the teachers do.
        teachers: score them.
        limits: what rows are checked against.
        score_tolerance: largest mean |Δ| between the log-probs of sampling and of scoring; None
            when they are of different distributions on purpose.
    """

    prompts: Sequence[PromptRow]
    context: GenerateContext
    student: Scorer
    teachers: Teachers
    limits: RowLimits
    score_tolerance: float | None


async def prepare(
    folder: Path,
    settings: Settings,
    parts: PrepareParts,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Write every shard that is not there yet, then the finished manifest.

    Raises:
        ConfigError: the folder holds answers of other settings.
        DataError: the student's log-probs of sampling and of scoring disagree.
        EngineError: an engine failed. Prepare again to go on.
    """
    manifest = _begin(folder, settings)
    preparation = _Preparation(folder, settings, parts, on_progress)
    entries = [await preparation.shard(number) for number in range(preparation.num_shards)]
    manifest = manifest.finished(tuple(entries))
    write_manifest(folder, manifest)
    return manifest


def prompts_hash(rows: Iterable[PromptRow]) -> str:
    """A hash over all that goes from prompts into recorded rows, in order: tokens, and what the
    data says beside them (the name of the teacher, for one)."""
    digest = hashlib.sha256()
    for row in rows:
        said = json.dumps([row.prompt, row.label, row.metadata], sort_keys=True).encode()
        for data in (row.prompt_tokens.tobytes(), said):
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()[:32]


def _begin(folder: Path, settings: Settings) -> Manifest:
    """The manifest of what is about to be written; it is on the disk before any shard is."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FILE_NAME).exists():
        found = read_manifest(folder).settings
        if found.fingerprint != settings.fingerprint:
            before, now = msgspec.structs.asdict(found), msgspec.structs.asdict(settings)
            differing = [name for name in now if before[name] != now[name]]
            raise ConfigError(
                "the folder holds answers that were prepared with other settings",
                where=f"opd.data: {folder}",
                expected="; ".join(f"{name}: {before[name]}" for name in differing),
                found="; ".join(f"{name}: {now[name]}" for name in differing),
                fix="name another folder, or delete this one",
            )
    manifest = Manifest(settings, __version__, is_complete=False)
    write_manifest(folder, manifest)
    return manifest


class _Preparation:
    """The work on one shard after the other."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        parts: PrepareParts,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._parts = parts
        self._on_progress = on_progress
        self.num_shards = -(-settings.num_prompts // settings.prompts_per_shard)

    async def shard(self, number: int) -> ShardEntry:
        """The shard's entry; written first unless it is there."""
        path = self._folder / shard_name(number)
        done = await asyncio.to_thread(self._finished, number, path)
        if done is not None:
            logger.info("%s is there already", path.name)
            return done
        samples = self._fresh_samples(number)
        seconds: dict[str, float] = {}
        await self._phase(number, "generate", samples, self._answer, seconds)
        student: dict[int, FloatArray] = {}
        await self._phase(number, "student", samples, lambda s: self._rescore(s, student), seconds)
        self._check_scores(path.name, samples, student)
        await self._phase(number, "teacher", samples, self._parts.teachers.score, seconds)
        rows = [self._row(sample, student[sample.index]) for sample in samples]
        facts = ShardFacts(self._settings.fingerprint, seconds)
        await asyncio.to_thread(write_shard, path, rows, facts)
        num_tokens = sum(sample.response_length for sample in samples)
        return await asyncio.to_thread(entry_of, path, len(rows), num_tokens, facts)

    def _finished(self, number: int, path: Path) -> ShardEntry | None:
        """The entry of a shard that is there and good; None when it has to be (re)done."""
        if not path.exists():
            return None
        try:
            table = read_table(path)
            facts, refusals = facts_of(table), Refusals()
            num_rows, num_tokens = check_shard(table, path, self._parts.limits, refusals)
            refusals.raise_any("a shard has rows that cannot be used", fix="it is done again")
        except DataError as error:
            logger.warning("%s is done again: %s", path.name, error)
            return None
        if facts is None or facts.settings != self._settings.fingerprint:
            logger.warning("%s is done again: it was written with other settings", path.name)
            return None
        if answers_in(table) != self._answers_of(number):
            logger.warning("%s is done again: it holds other answers than it should", path.name)
            return None
        return entry_of(path, num_rows, num_tokens, facts)

    def _answers_of(self, number: int) -> list[tuple[int, int]]:
        """(prompt's place, attempt) of each answer in a shard, in their order."""
        size = self._settings.prompts_per_shard
        places = range(number * size, min((number + 1) * size, self._settings.num_prompts))
        attempts = range(self._settings.samples_per_prompt)
        return [(place, attempt) for place in places for attempt in attempts]

    def _fresh_samples(self, number: int) -> list[Sample]:
        """A sample per answer; seeds come from group (the prompt's place) and attempt."""
        return [
            Sample(
                prompt_tokens=self._parts.prompts[place].prompt_tokens,
                index=place * self._settings.samples_per_prompt + attempt,
                group_index=place,
                attempt=attempt,
                prompt=self._parts.prompts[place].prompt,
                label=self._parts.prompts[place].label,
                metadata=dict(self._parts.prompts[place].metadata),
            )
            for place, attempt in self._answers_of(number)
        ]

    async def _phase(
        self,
        shard: int,
        phase: str,
        samples: Sequence[Sample],
        work: Callable[[Sample], Awaitable[None]],
        seconds: dict[str, float],
    ) -> None:
        """Do `work` for all samples at once; how many requests that makes, the engines limit."""
        num_done = 0
        started = time.monotonic()

        async def one(sample: Sample) -> None:
            nonlocal num_done
            await work(sample)
            num_done += 1
            self._on_progress(Progress(shard, self.num_shards, phase, num_done, len(samples)))

        try:
            async with asyncio.TaskGroup() as tasks:
                for sample in samples:
                    tasks.create_task(one(sample))
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        seconds[phase] = time.monotonic() - started

    async def _answer(self, sample: Sample) -> None:
        await self._parts.context.extend(sample)
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            raise EngineError(
                "an answer was not finished",
                where=f"prompt {sample.group_index}, answer {sample.attempt}",
                expected="completed or truncated",
                found=sample.status.value,
                fix="prepare again: finished shards are kept",
            )

    async def _rescore(self, sample: Sample, scores: dict[int, FloatArray]) -> None:
        if sample.response_length == 0:
            scores[sample.index] = float_array([])
            return
        scores[sample.index] = await self._parts.student.score(
            f"student/{sample.index}", sample.tokens, len(sample.prompt_tokens)
        )

    def _check_scores(
        self, name: str, samples: Sequence[Sample], scores: dict[int, FloatArray]
    ) -> None:
        """The engine must score its own answers as it sampled them."""
        tolerance = self._parts.score_tolerance
        if tolerance is None:
            return
        refusals = Refusals()
        for row, sample in enumerate(samples):
            scored = scores[sample.index]
            refusals.add(name, row, gap_problem(sample.rollout_log_probs, scored, tolerance))
        refusals.raise_any(
            "the student's engine scores its own answers differently than it sampled them",
            fix="check that the engine serves the model and samples at temperature 1; for low "
            "precision raise opd.score_tolerance, or set opd.allow_mismatch: [scores]",
        )

    def _row(self, sample: Sample, student: FloatArray) -> RecordedRow:
        if sample.teacher_log_probs is None:
            raise ValueError(f"sample {sample.index} was not scored")
        return RecordedRow(
            prompt_index=sample.group_index,
            attempt=sample.attempt,
            prompt=sample.prompt,
            prompt_tokens=sample.prompt_tokens,
            response_tokens=sample.response_tokens,
            response=sample.response,
            finish_reason="stop" if sample.status is Status.COMPLETED else "length",
            sampler_log_probs=sample.rollout_log_probs,
            student_log_probs=student,
            teacher_log_probs=sample.teacher_log_probs,
            teacher=self._parts.teachers.name_for(sample),
            sampling=self._parts.context.sampling,
            label=sample.label,
            metadata=sample.metadata,
        )


def gap_problem(first: FloatArray, second: FloatArray, tolerance: float) -> list[str]:
    """What is wrong with two scorings of an answer, one entry at most: other lengths, or a mean |Δ|
    over its tokens that is above `tolerance` or not a number."""
    if len(first) != len(second):
        return [f"expected {len(first)} log-probs, found {len(second)}"]
    gap = float(np.abs(first - second).mean()) if len(first) else 0.0
    return [] if gap <= tolerance else [f"mean |Δ log-prob| {gap:.3g}, tolerated {tolerance:g}"]
