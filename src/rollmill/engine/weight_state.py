"""Which weights the engines should serve, shared by the pool and its members.

The invariant: tokens may be of any version from the one that was current when their request was
sent to the newest one that any engine may have by now; anything else is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollmill.engine.delivery import Delivery
from rollmill.engine.parse import check_version
from rollmill.engine.types import GenerateResult


@dataclass(slots=True)
class WeightState:
    """The current weights.

    Attributes:
        version: current version; None when attached engines serve weights nobody has numbered.
        delivery: how an engine gets the current weights; None while engines serve the ones they
            started with.
        installing: version that is on its way to the engines.
        is_paused: the pool holds generation.
        released: parts of the engines' memory that are released now.
    """

    version: int | None
    delivery: Delivery | None = None
    installing: int | None = None
    is_paused: bool = False
    released: set[str] = field(default_factory=set)

    @property
    def is_generating(self) -> bool:
        """Whether engines can generate; health checks fail while they cannot."""
        return not self.is_paused and not self.released

    def newest(self) -> int | None:
        """The newest version that a token may have now; None when any is fine."""
        if self.installing is not None:
            return self.installing
        return self.version

    def check(self, result: GenerateResult, oldest: int | None, *, where: str) -> None:
        """Raise `WrongVersion` when a token is of a version that it cannot have."""
        for version in result.versions:
            check_version(version, oldest, self.newest(), where=where)
