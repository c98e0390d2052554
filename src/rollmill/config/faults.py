"""Faults made on purpose, to see that a run survives them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from rollmill.config.base import Section


class FaultKind(StrEnum):
    """What can be broken. `engine_…` kinds need engines that the run started itself."""

    ENGINE_KILL = "engine_kill"
    """An engine's process is killed."""
    ENGINE_HANG = "engine_hang"
    """An engine's process is stopped for good; health checks must find that out."""
    ENGINE_SLOW = "engine_slow"
    """An engine's process is stopped for `pause_s` seconds."""
    DROP = "drop"
    """The connection of a request breaks after the engine has answered."""
    CORRUPT_REPLY = "corrupt_reply"
    """The body of an answer arrives damaged."""
    TRAINER_KILL = "trainer_kill"
    """The trainer's process is killed."""
    DISK_FULL = "disk_full"
    """The trainer's part of the next checkpoint cannot be written."""


ENGINE_KINDS = (FaultKind.ENGINE_KILL, FaultKind.ENGINE_HANG, FaultKind.ENGINE_SLOW)
"""Kinds that need the engine's process id."""


class FaultsConfig(Section):
    """A seeded schedule of faults; off unless `every` is set. For tests, not for real runs."""

    every: int = Field(0, ge=0)
    """Steps between two faults; 0 is off."""
    seed: int = 0
    """Of the schedule: the same seed breaks the same things in the same steps."""
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    """What is broken, in a seeded order in which each kind comes equally often."""
    pause_s: float = Field(2.0, gt=0)
    """How long `engine_slow` stops an engine."""

    @model_validator(mode="after")
    def _has_kinds(self) -> FaultsConfig:
        if self.every and not self.kinds:
            raise ValueError("kinds: expected at least one kind of fault, found none")
        return self
