"""Teachers and students of one seed, trained once and kept on the disk for all arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.distill.measure import load_model
from tiny_study.answers import Answer, Epochs, accuracy, draw
from tiny_study.learning import SFT, learn, make_learner
from tiny_study.settings import Settings
from tiny_study.task import Prompts, demonstrations, draw_prompts, make_model, save_model

TEACHERS = ("A", "B")
STUDENTS = {"realizable": "as large as its teacher", "limited": "much smaller than its teacher"}
LEARNING_RATE = 2e-3
_MEASURING_SEED = 7_000


@dataclass(frozen=True)
class Place:
    """Where the models of one seed are, and what they are trained on.

    Args:
        folder: of the study.
        seed: its number from 0.
        settings: the sizes.
    """

    folder: Path
    seed: int
    settings: Settings

    @property
    def prompts(self) -> Prompts:
        """Training and held-out prompts of the seed."""
        sizes = self.settings
        return draw_prompts(
            self.seed, num_training=sizes.num_prompts, num_held_out=sizes.num_measured
        )

    def teacher(self, name: str) -> Path:
        """Folder of teacher A or B."""
        return self.folder / f"seed_{self.seed}" / f"teacher_{name}"

    def student(self, size: str, sft_teacher: str) -> Path:
        """Folder of a student after SFT."""
        return self.folder / f"seed_{self.seed}" / f"{size}_after_{sft_teacher}"


def train_teacher(place: Place, name: str) -> dict[str, Any]:
    """Train teacher A or B on demonstrations of its kind, save it, and say how good it is."""
    sizes, prompts = place.settings, place.prompts
    model = make_model(
        1000 * place.seed + TEACHERS.index(name),
        hidden_size=sizes.hidden_size,
        layers=sizes.layers,
    )
    shown = demonstrations(prompts.training, name, place.seed)
    answers = [Answer(p, tokens) for p, tokens in zip(prompts.training, shown, strict=True)]
    _fine_tune(model, answers, sizes.teacher_steps, sizes.batch_size, seed=place.seed)
    save_model(model, place.teacher(name))
    right = accuracy(draw(model, prompts.held_out, _MEASURING_SEED))
    return {
        "seed": place.seed,
        "teacher": name,
        "accuracy": right,
        "parameters": num_parameters(model),
    }


def num_parameters(model: Any) -> int:
    """Numbers in a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def sft_data(place: Place, teacher: str) -> list[Answer]:
    """The teacher's answers to the training prompts: what students are fine-tuned on."""
    model = load_model(place.teacher(teacher))
    answers = draw(model, place.prompts.training, 10_000 + place.seed)
    return [Answer(answer.prompt, answer.tokens) for answer in answers]


def train_student(place: Place, size: str, teacher: str) -> dict[str, Any]:
    """Fine-tune a student of a size on the teacher's answers, and save it."""
    sizes = place.settings
    is_small = size == "limited"
    model = make_model(
        1000 * place.seed + 100,
        hidden_size=sizes.small_hidden_size if is_small else sizes.hidden_size,
        layers=1 if is_small else sizes.layers,
    )
    data = sft_data(place, teacher)
    _fine_tune(model, data, sizes.sft_steps, sizes.batch_size, seed=place.seed)
    save_model(model, place.student(size, teacher))
    return {
        "seed": place.seed,
        "student": size,
        "sft_teacher": teacher,
        "parameters": num_parameters(model),
    }


def _fine_tune(
    model: Any, answers: Sequence[Answer], num_steps: int, batch_size: int, *, seed: int
) -> None:
    learner = make_learner(model, SFT, lr=LEARNING_RATE, num_steps=num_steps)
    epochs = Epochs(answers, seed)
    for step in range(num_steps):
        learn(learner, epochs.take(batch_size), step)
    model.eval()
