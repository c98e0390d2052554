"""The arms: how a student that was fine-tuned on its teacher's answers goes on from there.

All arms have the same start, the same number of optimizer steps of the same size, and the same
optimizer. They differ in where their answers come from and in what is done with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rollmill.config.opd import OpdConfig
from tiny_study.answers import Answer, Epochs, draw, num_tokens, scored
from tiny_study.learning import SFT, Costs, learn, make_learner, measure
from tiny_study.task import MAX_NEW_TOKENS

OPD = {
    "advantage": "none",
    "loss": "policy_gradient",
    "aggregation": "constant",
    "constant_length": MAX_NEW_TOKENS,
}
"""The sum over an answer's tokens as in the papers, over a constant."""
LEARNING_RATE = 5e-4
METRICS = ("policy/teacher_kl", "policy/teacher_clip_fraction", "opd/importance_mean",
           "opd/importance_std", "opd/importance_ess", "optimizer/grad_norm")  # fmt: skip
"""What rollmill's trainer reports of the last step, kept in the results when it is there."""


@dataclass(frozen=True)
class Arm:
    """One way to go on.

    Attributes:
        title: for tables.
        answers: `demonstrations` are the teacher's, `fresh` the current student's, `recorded` the
            first student's.
        algorithm: `trainer.algorithm` of a configuration.
        opd: `opd` of a configuration.
    """

    title: str
    answers: Literal["demonstrations", "fresh", "recorded"]
    algorithm: dict[str, Any]
    opd: dict[str, Any] | None = None

    def opd_config(self) -> OpdConfig | None:
        """The section, with what it asks for and the study does not use: the answers and the
        teacher are in memory."""
        if self.opd is None:
            return None
        unused = {"data": Path("memory")} if self.answers == "recorded" else {}
        teacher = {"path": "memory"}
        return OpdConfig.model_validate({**self.opd, **unused, "teacher": teacher})


ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        "sft": Arm("SFT, continued", "demonstrations", SFT),
        "live": Arm("live OPD", "fresh", OPD, {"mode": "live"}),
        "offline": Arm("offline OPD, w = 1", "recorded", OPD, {"mode": "offline"}),
        "truncated": Arm(
            "offline OPD, w ≤ 2",
            "recorded",
            OPD,
            {"mode": "offline", "importance": "truncate", "importance_level": "sequence"},
        ),
        "frozen": Arm(
            "frozen advantage",
            "recorded",
            {**OPD, "loss": "frozen.py:frozen"},
            {"mode": "offline"},
        ),
    }
)


@dataclass(frozen=True)
class Recording:
    """Answers that were drawn and scored before training, and what that cost."""

    answers: list[Answer]
    costs: Costs


def record(student: Any, teacher: Any, prompts: Sequence[str], seed: int) -> Recording:
    """One answer of the first student to each prompt, scored by the teacher."""
    costs = Costs()
    with costs.timed("prepare"):
        answers = scored(draw(student, prompts, seed), teacher)
    costs.generated = costs.scored = num_tokens(answers)
    return Recording(answers, costs)


@dataclass(frozen=True)
class Material:
    """What the arms of one student and one teacher start from.

    Attributes:
        student: after SFT; it is copied, not changed.
        teacher: of the distillation.
        demonstrations: its SFT data.
        recording: the student's answers, scored by the teacher.
        prompts: of training.
        held_out: prompts to measure with.
        seed: of the order of the data and of the draws.
    """

    student: Any
    teacher: Any
    demonstrations: Sequence[Answer]
    recording: Recording
    prompts: Sequence[str]
    held_out: Sequence[str]
    seed: int


def run_arm(
    arm: Arm, material: Material, *, num_steps: int, marks: Sequence[int], batch_size: int
) -> dict[str, Any]:
    """Train a copy of the student; its curve, its costs, and the trainer's last metrics."""
    model = copy.deepcopy(material.student)
    learner = make_learner(
        model, arm.algorithm, lr=LEARNING_RATE, num_steps=num_steps, opd=arm.opd_config()
    )
    costs = Costs()
    next_batch = _source(arm, model, material, costs)
    curve, metrics = [], {}
    for step in range(num_steps + 1):
        if step in marks:
            model.eval()
            curve.append(
                measure(model, material.teacher, material.held_out, step=step, seed=material.seed)
            )
        if step < num_steps:
            batch = next_batch(batch_size)
            with costs.timed("train"):
                metrics = learn(learner, batch, step)
    return {
        "curve": [asdict(point) for point in curve],
        "seconds": dict(costs.seconds),
        "tokens_generated": costs.generated,
        "tokens_scored": costs.scored,
        "last_metrics": {name: metrics[name] for name in METRICS if name in metrics},
    }


def _source(
    arm: Arm, model: Any, material: Material, costs: Costs
) -> Callable[[int], list[Answer]]:
    """Where the batches of an arm come from; it notes its costs."""
    if arm.answers == "demonstrations":
        return Epochs(material.demonstrations, material.seed).take
    if arm.answers == "recorded":
        prepared = material.recording.costs
        costs.generated, costs.scored = prepared.generated, prepared.scored
        costs.seconds.update(prepared.seconds)
        return Epochs(material.recording.answers, material.seed).take
    prompts = Epochs(material.prompts, material.seed)
    seeds = count(1000 * material.seed)

    def fresh(batch_size: int) -> list[Answer]:
        with costs.timed("generate"):
            answers = draw(model, prompts.take(batch_size), next(seeds))
        with costs.timed("score"):
            answers = scored(answers, material.teacher)
        costs.generated += num_tokens(answers)
        costs.scored += num_tokens(answers)
        return answers

    return fresh
