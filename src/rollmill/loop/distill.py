"""Offline distillation, put together: preparing recorded answers, and training from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np

from rollmill.cluster.ranks import Worker
from rollmill.config import Config
from rollmill.config.opd import Mismatch, not_plain
from rollmill.config.rollout import RolloutHooks
from rollmill.data import PromptRow, load_dataset
from rollmill.distill.checks import MAX_SHOWN, RowLimits
from rollmill.distill.identity import tokenizer_identity, weights_hash
from rollmill.distill.manifest import Manifest, Settings
from rollmill.distill.mismatch import (
    Difference,
    StartOfRun,
    refuse,
    sampling_differences,
    teacher_differences,
)
from rollmill.distill.prepare import SCOPE, PrepareParts, Progress, prepare, prompts_hash
from rollmill.distill.recorded import RecordedSource
from rollmill.distill.recording import check_scores, open_recorded
from rollmill.engine.pool import EnginePool
from rollmill.errors import ConfigError, DataError
from rollmill.loop.policy import Policy, open_policy
from rollmill.loop.run_dir import RunLock
from rollmill.loop.teachers import (
    OpenTeachers,
    check_teacher_names,
    identity_of,
    open_teachers,
    scorable_length,
    teacher_folder,
)
from rollmill.models import end_ids_of, vocab_size_of
from rollmill.rollout.gate import Gate
from rollmill.rollout.generate import GenerateContext
from rollmill.rollout.teacher import Teachers
from rollmill.sample_codec import encode_sample

STUDENT = "student"
"""Folder of the student's engines (logs) beside the recorded answers."""


async def prepare_answers(
    config: Config, *, base_dir: Path, on_progress: Callable[[Progress], None] = lambda _: None
) -> Manifest:
    """Have the student answer and student and teachers score, as `config` says; `opd.data` then
    holds everything that `opd.mode: offline` needs.

    Args:
        config: the whole configuration; its `rollout.sampling`, `data` and `opd` decide the rows.
        base_dir: folder of the configuration file.
        on_progress: told after every answer of every phase.

    Raises:
        RollmillError: something cannot be used as configured, or an engine failed.
    """
    folder, allowed = _preparable(config)
    policy = open_policy(config)
    folders = [policy.folder]
    teachers = [teacher_folder(name, t) for name, t in config.opd.all_teachers().items()]
    length = scorable_length(config, policy, [*folders, *teachers])
    prompts = _prompts(config, policy, length, base_dir)
    check_teacher_names(config, prompts)
    _check_no_images(prompts)
    async with AsyncExitStack() as stack:
        stack.enter_context(RunLock(folder))
        opened = await stack.enter_async_context(open_teachers(config, policy, folder))
        settings = await asyncio.to_thread(
            _settings, config, policy, opened, prompts=prompts, context_length=length
        )
        differences = teacher_differences(settings)
        allowed |= {*refuse(differences, config.opd.allow_mismatch, where="opd.sft_teacher")}
        student = EnginePool(
            config.engine.model_copy(update={"offload": False, "router": "none"}),
            model_path=str(policy.folder),
            tokenizer_path=config.model.tokenizer,
            run_dir=folder / STUDENT,
        )
        await stack.enter_async_context(student)
        allowed |= {*await _check_student_engines(config, student, settings.student)}
        allowed |= {*opened.allowed}
        settings = msgspec.structs.replace(settings, allowed=tuple(sorted(allowed)))
        parts = _parts(config, policy, student, opened, prompts=prompts, context_length=length)
        return await prepare(folder, settings, parts, on_progress)


def _preparable(config: Config) -> tuple[Path, set[Mismatch]]:
    """The folder to write, and which differences of the sampling are allowed.

    Raises:
        ConfigError: answers cannot be prepared as configured.
    """
    folder = config.opd.data
    if folder is None or not config.opd.all_teachers():
        raise ConfigError(
            "there is nothing to prepare with",
            where="opd",
            expected="data (the folder to write) and teacher (path or url)",
            found=f"data: {folder}, teachers: {len(config.opd.all_teachers())}",
            fix="add opd.mode: offline, opd.data and opd.teacher: see docs/distillation.md",
        )
    _check_hooks(config.rollout.hooks)
    allowed = refuse(
        sampling_differences(config.rollout.sampling),
        config.opd.allow_mismatch,
        where="rollout.sampling",
    )
    return folder, {*allowed}


def _check_hooks(hooks: RolloutHooks) -> None:
    """Raise ConfigError for functions of the user's that a preparation would leave out."""
    reasons = {
        "generate": "one engine call writes an answer, and every token of it is learned",
        "data_source": "prompts come from `data`, so that each answer has its place and seed",
        "rollout": "answers are prepared shard by shard",
    }
    for name, reason in reasons.items():
        if (function := getattr(hooks, name)) is not None:
            raise ConfigError(
                f"answers of a {name} function of your own cannot be prepared",
                where=f"rollout.hooks.{name}",
                expected=f"null: {reason}",
                found=function,
                fix=f"prepare with rollout.hooks.{name}=null, or distill with opd.mode: live",
            )


def _check_no_images(prompts: list[PromptRow]) -> None:
    """Raise DataError when rows have images: student and teachers would not be sent them."""
    rows = [row.row_id for row in prompts if row.images]
    if rows:
        raise DataError(
            "answers to prompts with images cannot be prepared: engines are sent tokens only",
            where=rows[0],
            expected="prompts of text",
            found=f"images in {len(rows)} rows: {', '.join(rows[:MAX_SHOWN])}"
            + (" …" if rows[MAX_SHOWN:] else ""),
            fix="set data.images_key to null to leave images out, or take the rows out",
        )


async def _check_student_engines(
    config: Config, student: EnginePool, expected: str
) -> list[Mismatch]:
    """Attached engines must serve the student, as far as their folders are on this machine; what
    they serve elsewhere shows when training scores some rows anew. The differences allowed."""
    found: list[Difference] = []
    for client in student.clients if config.engine.urls else ():
        folder = Path((await client.model_info()).model_path)
        if not any(folder.glob("*.safetensors")):
            continue
        served = await asyncio.to_thread(weights_hash, folder)
        if served != expected:
            what = f"the engine at {client.url} serves other weights than model.path"
            found.append(Difference("student", what, expected, served))
    return refuse(found, config.opd.allow_mismatch, where="engine.urls")


def _prompts(config: Config, policy: Policy, length: int, base_dir: Path) -> list[PromptRow]:
    dataset = load_dataset(
        config.data,
        tokenizer=policy.tokenizer,
        context_length=length,
        base_dir=base_dir,
        seed=config.run.seed,
    )
    return dataset.rows[: config.opd.prepare.num_prompts]


def _settings(
    config: Config,
    policy: Policy,
    opened: OpenTeachers,
    *,
    prompts: list[PromptRow],
    context_length: int,
) -> Settings:
    """All that decides the rows."""
    own = str(config.engine.embedded.dtype)
    is_teacher_here = all(t.path is not None for t in config.opd.all_teachers().values())
    sft = config.opd.sft_teacher
    return Settings(
        student=weights_hash(policy.folder),
        teachers=opened.identities,
        sft_teacher=None if sft is None else identity_of(sft),
        tokenizer=tokenizer_identity(policy.tokenizer),
        sampling=config.rollout.sampling.model_dump(mode="json"),
        dtypes={
            "student": "external" if config.engine.urls else own,
            "teacher": own if is_teacher_here else "external",
        },
        seed=config.run.seed,
        num_prompts=len(prompts),
        samples_per_prompt=config.rollout.n_samples_per_prompt,
        prompts_per_shard=config.opd.prepare.prompts_per_shard,
        prompts=prompts_hash(prompts),
        context_length=context_length,
    )


def _parts(
    config: Config,
    policy: Policy,
    student: EnginePool,
    opened: OpenTeachers,
    *,
    prompts: list[PromptRow],
    context_length: int,
) -> PrepareParts:
    is_other_on_purpose = bool(not_plain(config.rollout.sampling))
    is_unchecked = is_other_on_purpose or "scores" in config.opd.allow_mismatch
    context = GenerateContext(
        engines=student,
        gate=Gate(config.engine.max_concurrent_requests),
        tokenizer=policy.tokenizer,
        sampling=config.rollout.sampling,
        context_length=context_length,
        seed=config.run.seed,
        step=0,
        scope=SCOPE,
        new_index=_no_siblings,
    )
    return PrepareParts(
        prompts=prompts,
        context=context,
        student=student,
        teachers=Teachers(opened.pools),
        limits=RowLimits(vocab_size_of(policy.folder), context_length, is_other_on_purpose),
        score_tolerance=None if is_unchecked else config.opd.score_tolerance,
    )


def _no_siblings() -> int:
    raise ValueError("prepared answers do not fan out")


def open_recorded_source(config: Config, policy: Policy) -> RecordedSource:
    """The recorded answers of `opd.data`, checked against the run.

    Raises:
        ConfigError: they do not fit the run, and the difference is not allowed.
        DataError: files or rows cannot be used; every one is named.
    """
    start = StartOfRun(weights_hash(policy.folder), tokenizer_identity(policy.tokenizer))
    recording = open_recorded(
        config.opd,
        start=start,
        tokenizer=policy.tokenizer,
        limits=RowLimits(vocab_size_of(policy.folder), policy.context_length),
        samples_per_prompt=config.rollout.n_samples_per_prompt,
        end_ids=sorted({*end_ids_of(policy.folder), policy.tokenizer.eos_token_id} - {None}),
    )
    return RecordedSource(recording, seed=config.run.seed, shuffle=config.data.shuffle)


async def check_recorded_scores(trainer: Worker, source: RecordedSource, config: Config) -> None:
    """Have the trainer, which still has the starting weights, score some rows anew.

    Raises:
        DataError: they were recorded with other log-probs; every such row is named.
    """
    if "scores" in config.opd.allow_mismatch:
        return
    places = source.draw(config.opd.num_rescored, config.run.seed)
    samples = [
        place.read().to_sample(index=0, group_index=n, attempt=0) for n, place in enumerate(places)
    ]
    raw = await trainer.call(
        "score", samples=[encode_sample(sample) for sample in samples], temperature=1.0
    )
    scores = [np.frombuffer(data, np.float32) for data in raw]
    check_scores(places, scores, tolerance=config.opd.score_tolerance)


def mismatch_metrics(
    config: Config, source: object, of_teachers: Sequence[Mismatch] = ()
) -> dict[str, float]:
    """`opd/mismatch_allowed…` of each step: how many mismatches were allowed, and which.

    Args:
        config: the whole configuration.
        source: of the training groups.
        of_teachers: what was allowed when teachers were opened for a live distillation.
    """
    if not config.opd.is_on:
        return {}
    allowed = set(of_teachers)
    if isinstance(source, RecordedSource):
        allowed |= {*source.recording.allowed}
        allowed |= {kind for kind in config.opd.allow_mismatch if kind == "scores"}
    return {"opd/mismatch_allowed": float(len(allowed))} | {
        f"opd/mismatch_allowed/{kind}": 1.0 for kind in sorted(allowed)
    }
