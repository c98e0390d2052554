"""All runs of one seed and one size of student."""

from __future__ import annotations

from typing import Any

from rollmill.distill.measure import load_model
from tiny_study.arms import ARMS, Material, record, run_arm
from tiny_study.models import TEACHERS, Place, sft_data

MISMATCH_ARMS = ("live", "offline")


def run_student(place: Place, size: str) -> list[dict[str, Any]]:
    """Every arm with teacher A throughout, then the other combinations of the two teachers.

    Returns:
        One record per run, as `results.json` has them.
    """
    sizes = place.settings
    materials = {x + y: material_of(place, size, x, y) for x in TEACHERS for y in TEACHERS}
    wanted = [
        (name, pair, sizes.num_steps if pair == "AA" else sizes.mismatch_steps)
        for pair in materials
        for name in (ARMS if pair == "AA" else MISMATCH_ARMS)
    ]
    return [
        {
            "seed": place.seed,
            "student": size,
            "arm": name,
            "sft_teacher": pair[0],
            "opd_teacher": pair[1],
            **run_arm(
                ARMS[name],
                materials[pair],
                num_steps=num_steps,
                marks=sizes.marks,
                batch_size=sizes.batch_size,
            ),
        }
        for name, pair, num_steps in wanted
    ]


def material_of(
    place: Place, size: str, sft_teacher: str, opd_teacher: str, draws: int = 0
) -> Material:
    """A student after SFT, a teacher, and the answers that the second scored of the first.

    Args:
        place: the seed.
        size: of the student.
        sft_teacher: who wrote its SFT data.
        opd_teacher: who teaches it now.
        draws: other numbers give other answers and another order of the data.
    """
    student = load_model(place.student(size, sft_teacher))
    teacher = load_model(place.teacher(opd_teacher))
    prompts = place.prompts
    seed = 20_000 + 100 * place.seed + draws
    return Material(
        student=student,
        teacher=teacher,
        demonstrations=sft_data(place, sft_teacher),
        recording=record(student, teacher, prompts.training, seed),
        prompts=prompts.training,
        held_out=prompts.held_out,
        seed=seed,
    )
