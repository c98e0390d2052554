"""How large the study is. `FULL` is what the README shows; `QUICK` shows that everything works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True)
class Settings:
    """Sizes of one study.

    Attributes:
        num_seeds: repetitions; each has its own data, teachers, students and draws.
        num_steps: optimizer steps of every arm.
        mismatch_steps: optimizer steps at which the combinations of teachers are compared.
        teacher_steps: optimizer steps of a teacher on its demonstrations.
        sft_steps: optimizer steps of the students' fine-tuning on their teacher's answers.
        batch_size: answers per optimizer step.
        num_prompts: training prompts. SFT and the recording have one answer to each.
        num_measured: held-out prompts, answered afresh at every measurement.
        num_repeats: repetitions of one arm with other draws, to compare the commands with.
        hidden_size: of the teachers and of the student that is like them.
        layers: of the same.
        small_hidden_size: of the student that cannot be like its teacher; it has one layer.
    """

    num_seeds: int = 3
    num_steps: int = 800
    mismatch_steps: int = 200
    teacher_steps: int = 1000
    sft_steps: int = 400
    batch_size: int = 64
    num_prompts: int = 8192
    num_measured: int = 1024
    num_repeats: int = 3
    hidden_size: int = 64
    layers: int = 2
    small_hidden_size: int = 32

    @property
    def marks(self) -> tuple[int, ...]:
        """Steps after which the students are measured, 0 and the last among them."""
        wanted = (0, 25, 50, 100, 400, 600, 800, 1200, 2000, self.mismatch_steps, self.num_steps)
        return tuple(sorted({step for step in wanted if step <= self.num_steps}))

    def changed(self, assignments: Sequence[str]) -> Settings:
        """The same with `name=number` changes.

        Raises:
            ValueError: there is no such setting, or no whole number of at least 1.
        """
        changes: dict[str, int] = {}
        known = [field.name for field in fields(self)]
        for assignment in assignments:
            name, _, value = assignment.partition("=")
            if name not in known or not value.isdecimal() or int(value) < 1:
                raise ValueError(
                    f"expected name=number with a number of at least 1 and one of "
                    f"{', '.join(known)}; found {assignment!r}"
                )
            changes[name] = int(value)
        changed = replace(self, **changes)
        if changed.mismatch_steps > changed.num_steps:
            raise ValueError(
                f"mismatch_steps: expected at most num_steps ({changed.num_steps}), "
                f"found {changed.mismatch_steps}"
            )
        return changed

    def as_dict(self) -> dict[str, int]:
        """For the results."""
        return asdict(self)


FULL = Settings()
QUICK = Settings(
    num_seeds=2,
    num_steps=100,
    mismatch_steps=50,
    teacher_steps=400,
    sft_steps=100,
    num_prompts=1024,
    num_measured=256,
    num_repeats=2,
)
