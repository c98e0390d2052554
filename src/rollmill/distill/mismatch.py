"""Whether recorded answers fit the run that wants to learn from them.

Offline distillation is the paper's only when the SFT data's teacher is the distillation's teacher
and the trained weights start as the model that was sampled, all over one vocabulary. `mismatches`
finds every way in which that does not hold, and a run goes on only with those that its
configuration allows by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.config.opd import Mismatch, not_plain
from rollmill.config.sampling import SamplingConfig
from rollmill.distill.identity import TokenizerIdentity
from rollmill.distill.manifest import Settings
from rollmill.errors import ConfigError


@dataclass(frozen=True)
class Difference:
    """Something that is not as offline distillation needs it, or that nobody can tell."""

    kind: Mismatch
    what: str
    expected: str
    found: str


@dataclass(frozen=True)
class StartOfRun:
    """What a run starts from: the hash of its weights, and its tokenizer's."""

    student: str
    tokenizer: TokenizerIdentity


def teacher_differences(settings: Settings, where: str = "opd.sft_teacher") -> list[Difference]:
    """Whether the SFT data's teacher is the one that scored, for every teacher."""
    if settings.sft_teacher is None:
        return [
            Difference(
                "teacher",
                "nobody says which teacher wrote the data that the student was fine-tuned on",
                f"{where}: the teacher's model folder, or its hash",
                "null",
            )
        ]
    return [
        Difference(
            "teacher",
            "the teacher of the SFT data is not the teacher of the distillation"
            + (f" (teacher {name!r})" if name else ""),
            settings.sft_teacher,
            teacher,
        )
        for name, teacher in settings.teachers.items()
        if teacher != settings.sft_teacher
    ]


def mismatches(settings: Settings, start: StartOfRun) -> list[Difference]:
    """Every way in which recorded answers do not fit the run that wants to learn from them."""
    found = teacher_differences(settings) + _allowed_before(settings)
    if start.student != settings.student:
        found.append(
            Difference(
                "student",
                "the run starts from other weights than those that were sampled",
                settings.student,
                start.student,
            )
        )
    return [
        *found,
        *tokenizer_differences(settings.tokenizer, start.tokenizer, "the sampled student's"),
    ]


def _allowed_before(settings: Settings) -> list[Difference]:
    """What was let pass when the answers were prepared, such as a teacher's other tokenizer."""
    return [
        Difference(
            kind,
            f"the answers were prepared with a difference that was allowed then: {kind}",
            "none",
            f"opd.allow_mismatch: [{', '.join(settings.allowed)}] when they were prepared",
        )
        for kind in settings.allowed
    ]


def tokenizer_differences(
    expected: TokenizerIdentity, found: TokenizerIdentity, whose: str
) -> list[Difference]:
    """Differences of two tokenizers: their tokens, and their chat templates."""
    parts = expected.differences(found)
    tokens = [part for part in parts if part != "template"]
    differences = []
    if tokens:
        differences.append(
            Difference(
                "tokenizer",
                f"the tokenizer is not {whose}",
                f"the same {', '.join(tokens)}",
                ", ".join(f"{part} {getattr(found, part)}" for part in tokens),
            )
        )
    if "template" in parts:
        differences.append(
            Difference(
                "template",
                f"the chat template is not {whose}",
                expected.template,
                found.template,
            )
        )
    return differences


def sampling_differences(sampling: SamplingConfig) -> list[Difference]:
    """Differences between the sampled and the scored distribution."""
    return [
        Difference(
            "sampling",
            "answers were sampled from another distribution than engines score "
            "(temperature 1, the whole vocabulary)",
            problem.partition(", found ")[0],
            problem.partition(", found ")[2],
        )
        for problem in not_plain(sampling)
    ]


def refuse(found: list[Difference], allowed: tuple[Mismatch, ...], *, where: str) -> list[Mismatch]:
    """Raise for the first difference that is not allowed; the kinds of those that are.

    Raises:
        ConfigError: a difference that `opd.allow_mismatch` does not name.
    """
    for difference in found:
        if difference.kind not in allowed:
            raise ConfigError(
                difference.what,
                where=where,
                expected=difference.expected,
                found=difference.found,
                fix=f"mend it, or take the responsibility: opd.allow_mismatch: [{difference.kind}]",
            )
    return sorted({difference.kind for difference in found})
