"""Teachers of a run: their engines, who they are, and whether they speak the student's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy.typing as npt

from rollmill.config import Config, TeacherConfig
from rollmill.config.opd import Mismatch
from rollmill.data import PromptRow, load_tokenizer
from rollmill.distill.checks import MAX_SHOWN
from rollmill.distill.identity import TokenizerIdentity, tokenizer_identity, weights_hash
from rollmill.distill.mismatch import refuse, tokenizer_differences
from rollmill.engine.client import ModelInfo
from rollmill.engine.pool import EnginePool
from rollmill.errors import ConfigError, DataError, first_error
from rollmill.loop.activities import Activities, Kind
from rollmill.loop.policy import Policy
from rollmill.models import context_length_of, resolve_model
from rollmill.rollout.teacher import TEACHER_KEY, Scorer, Teachers, teacher_named
from rollmill.sample import FloatArray
from rollmill.telemetry.timeline import Timeline

TEACHERS = "teachers"
"""Folder of the teachers' engines (logs) in a run folder."""
HASH_PREFIXES = ("sha256:", "engine:")
"""How identities begin: of weights on this machine, and as an engine elsewhere reports them."""


class ObservedScorer:
    """A teacher's engines whose requests are registered and show on the timeline."""

    def __init__(self, scorer: Scorer, activities: Activities, timeline: Timeline) -> None:
        self._scorer = scorer
        self._activities = activities
        self._timeline = timeline

    async def score(
        self, rid: str, input_ids: npt.ArrayLike, start: int, *, session_id: str | None = None
    ) -> FloatArray:
        """Log-probs of the given tokens from position `start` on."""
        with self._timeline.span("teachers", "score", request=rid):
            return await self._activities.run(
                Kind.REQUEST,
                rid,
                lambda: self._scorer.score(rid, input_ids, start, session_id=session_id),
            )


async def live_teachers(
    stack: AsyncExitStack,
    config: Config,
    policy: Policy,
    root: Path,
    *,
    activities: Activities,
    timeline: Timeline,
) -> tuple[Teachers | None, list[Mismatch]]:
    """The teachers of a live distillation, running until `stack` closes, and the mismatches that
    were found and allowed; None and nothing for other runs."""
    if config.opd.mode != "live":
        return None, []
    opened = await stack.enter_async_context(open_teachers(config, policy, root))
    scorers = {
        name: ObservedScorer(pool, activities, timeline) for name, pool in opened.pools.items()
    }
    return Teachers(scorers), opened.allowed


def training_length(config: Config, policy: Policy) -> int:
    """Most tokens of prompt and answer in training: what teachers that run along can score.

    Raises:
        ConfigError: `model.context_length` asks for more.
    """
    if config.opd.mode != "live":
        return policy.context_length
    wanted = config.opd.all_teachers().items()
    return scorable_length(config, policy, [teacher_folder(name, t) for name, t in wanted])


def check_teacher_names(config: Config, rows: Iterable[PromptRow]) -> None:
    """Every row must have a teacher: the one it names, or the one of rows that name none.

    Raises:
        DataError: rows without one; the first of them are named.
    """
    known = config.opd.all_teachers()
    lost = [row for row in rows if teacher_named(row.metadata) not in tuple(known)]
    if lost:
        shown = [f"{row.row_id} ({row.metadata.get(TEACHER_KEY)!r})" for row in lost[:MAX_SHOWN]]
        raise DataError(
            f"no teacher for rows by their metadata.{TEACHER_KEY}",
            where=lost[0].row_id,
            expected=", ".join(name or "none (opd.teacher)" for name in known),
            found=f"{len(lost)} rows: {', '.join(shown)}" + (" …" if lost[MAX_SHOWN:] else ""),
            fix="add them to opd.teachers, or set opd.teacher for rows that name none",
        )


def is_without_reward(config: Config) -> bool:
    """Whether the teacher is the only signal: a live distillation without a reward."""
    reward = config.reward
    is_configured = reward.type or reward.function or reward.weights
    return config.opd.mode == "live" and not is_configured


@dataclass(frozen=True)
class OpenTeachers:
    """Running teachers.

    Attributes:
        pools: engines by the teacher's name.
        identities: hash of the weights by the teacher's name.
        allowed: kinds of differences to the student's tokenizer that were found and allowed.
    """

    pools: dict[str, EnginePool]
    identities: dict[str, str]
    allowed: list[Mismatch]


@asynccontextmanager
async def open_teachers(config: Config, policy: Policy, root: Path) -> AsyncIterator[OpenTeachers]:
    """Start or reach every teacher of `opd`, make sure of its tokenizer, and find out who it is.

    Args:
        config: the whole configuration.
        policy: the student.
        root: folder for the logs of teachers that are started.

    Raises:
        ConfigError: a teacher's tokenizer is not the student's, or cannot be found.
        RollmillError: a teacher's model or engine cannot be used.
    """
    student = tokenizer_identity(policy.tokenizer)
    wanted = config.opd.all_teachers()
    folders = {name: teacher_folder(name, teacher) for name, teacher in wanted.items()}
    allowed: set[Mismatch] = set()
    for name, teacher in wanted.items():
        if (folder := folders[name]) is not None:
            where = teacher.tokenizer or str(folder)
            allowed.update(_check_tokenizer(config, name, where, student))
    pools = {
        name: _pool(config, teacher, folders[name], root / TEACHERS / (name or "default"))
        for name, teacher in wanted.items()
    }
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as starting:
                for pool in pools.values():
                    starting.create_task(stack.enter_async_context(pool))
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        identities = {}
        for name, teacher in wanted.items():
            folder = folders[name]
            if folder is None:
                info = await pools[name].clients[0].model_info()
                where = _tokenizer_of(name, teacher, info)
                allowed.update(_check_tokenizer(config, name, where, student))
                identities[name] = await _identity_of_engine(pools[name], info)
            else:
                identities[name] = await asyncio.to_thread(weights_hash, folder)
        yield OpenTeachers(pools, identities, sorted(allowed))


def teacher_folder(name: str, teacher: TeacherConfig) -> Path | None:
    """The checked model folder of a teacher that is started here; None for one that runs already.

    Raises:
        ModelError: it is missing or unusable.
    """
    if teacher.path is None:
        return None
    return resolve_model(teacher.path, needs_tokenizer=teacher.tokenizer is None)


def identity_of(model: str) -> str:
    """A hash as it is, or that of the model folder that is named.

    Raises:
        ModelError: the folder is missing or unusable.
    """
    if model.startswith(HASH_PREFIXES):
        return model
    return weights_hash(resolve_model(model, needs_tokenizer=False))


def scorable_length(config: Config, policy: Policy, folders: list[Path | None]) -> int:
    """Most tokens of prompt and answer that every scoring engine takes.

    An engine takes inputs that are *shorter* than its context, so an answer that fills the context
    of a scoring engine could not be scored.

    Args:
        config: the whole configuration.
        policy: the student.
        folders: models of the scoring engines; None where that is not known.

    Raises:
        ConfigError: `model.context_length` asks for more.
    """
    limits = [context_length_of(folder) for folder in folders if folder is not None]
    room = min((limit - 1 for limit in limits if limit is not None), default=policy.context_length)
    if policy.context_length <= room:
        return policy.context_length
    if config.model.context_length is not None:
        raise ConfigError(
            "the longest answers could not be scored: engines score inputs that are shorter than "
            "their model's context",
            where="model.context_length",
            expected=f"at most {room}",
            found=str(config.model.context_length),
            fix="lower it",
        )
    return room


def _pool(config: Config, teacher: TeacherConfig, folder: Path | None, root: Path) -> EnginePool:
    """The engines of one teacher; its own context length, and the run's settings otherwise."""
    settings = config.engine.model_copy(
        update={
            "urls": () if teacher.url is None else (teacher.url,),
            "num_engines": teacher.num_engines,
            "port": None,
            "offload": False,
            "router": "none",
        }
    )
    return EnginePool(
        settings,
        model_path="" if folder is None else str(folder),
        tokenizer_path=teacher.tokenizer,
        run_dir=root,
    )


def _tokenizer_of(name: str, teacher: TeacherConfig, info: ModelInfo) -> str:
    """Folder of the tokenizer that an attached engine uses."""
    if teacher.tokenizer is not None:
        return teacher.tokenizer
    for path in (info.tokenizer_path, info.model_path):
        if path and Path(path).is_dir():
            return path
    raise ConfigError(
        "whether the teacher has the student's tokenizer cannot be seen: its folder is not on this "
        "machine",
        where=_place(name),
        expected="the teacher's tokenizer",
        found=f"{teacher.url} serves {info.model_path}",
        fix=f"copy the tokenizer's files here and set {_place(name)}.tokenizer to their folder",
    )


def _check_tokenizer(
    config: Config, name: str, folder: str, student: TokenizerIdentity
) -> list[Mismatch]:
    """Refuse another tokenizer than the student's; the differences that are allowed."""
    teacher = tokenizer_identity(
        load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    )
    found = tokenizer_differences(student, teacher, "the student's")
    return refuse(found, config.opd.allow_mismatch, where=f"{_place(name)}: {folder}")


async def _identity_of_engine(pool: EnginePool, info: ModelInfo) -> str:
    """By the folder when this machine has it, else as the engine itself tells."""
    folder = Path(info.model_path)
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return await asyncio.to_thread(weights_hash, folder)
    return f"engine:{(await pool.clients[0].weights.sums()).total}"


def _place(name: str) -> str:
    return f"opd.teachers.{name}" if name else "opd.teacher"
