"""Errors that a user can act on.

Every error that reaches a user says what is wrong, where, what was expected, what was found
and how to mend it. The parts are kept apart so that the command line can lay them out and a
test can look at one of them.
"""

from __future__ import annotations


class RollmillError(Exception):
    """Root of all errors that rollmill raises on purpose.

    Args:
        what: one sentence: what is wrong.
        where: the place, as the user would name it (`rollout.batch_size`, `train.jsonl:7`).
        expected: what would have been right.
        found: what was there instead.
        fix: what to do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix
        super().__init__(self._render())

    def parts(self) -> list[tuple[str, str]]:
        """The labelled lines that follow `what`, in reading order."""
        labelled = [
            ("where", self.where),
            ("expected", self.expected),
            ("found", self.found),
            ("fix", self.fix),
        ]
        return [(label, text) for label, text in labelled if text]

    def _render(self) -> str:
        lines = [self.what, *(f"  {label}: {text}" for label, text in self.parts())]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts when the error crosses a process boundary."""
        return (_rebuild, (type(self), self.what, dict(self.parts())))


def _rebuild(kind: type[RollmillError], what: str, parts: dict[str, str]) -> RollmillError:
    return kind(what, **parts)


class ConfigError(RollmillError):
    """The configuration cannot be used as it is."""


class DataError(RollmillError):
    """A data file, a row of it, or a prompt cannot be used."""


class HookError(RollmillError):
    """A user's function cannot be found, loaded or called as its hook requires."""


class ModelError(RollmillError):
    """A model or tokenizer folder is missing or unusable."""


class EngineError(RollmillError):
    """An inference engine failed, refused a request or answered nonsense."""


class RewardError(RollmillError):
    """A reward could not be set up. (A reward that fails on one answer is an outcome instead.)"""


class LedgerError(RollmillError):
    """The ledger cannot be read, or a group was about to be counted twice."""


class RolloutError(RollmillError):
    """A batch of rollouts could not be completed."""


class StallError(RolloutError):
    """Nothing went on for too long, or this is what was in the way."""


class TrainerError(RollmillError):
    """The trainer cannot do what was asked of it."""


class CheckpointError(RollmillError):
    """A checkpoint is missing, torn or corrupted."""


class WorkerError(RollmillError):
    """A worker process could not be started, died, or raised."""


class WorkerGone(WorkerError):
    """A worker process that was running has ended; what it held is lost."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error that stands for a group: the first of ours, or else the first of all."""
    error: BaseException = group.split(RollmillError)[0] or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
