"""Looking for samples over all steps, newest first, for a bounded time per request.

A search over two thousand files cannot be instant, and it need not be: each request looks as far as
its time allows and says where to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rollmill.viewer.errors import NotInRun
from rollmill.viewer.sample_files import SampleFiles, SampleRow

SECONDS = 1.0
MAX_HITS = 200


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for; None and empty mean anything.

    Attributes:
        text: part of the beginning of the prompt or of the response, upper or lower case.
        status: the status.
        group: which prompt.
        min_reward: the lowest reward.
        max_reward: the highest reward.
    """

    text: str = ""
    status: str = ""
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None

    def matches(self, row: SampleRow) -> bool:
        """Whether a sample is one of those looked for."""
        text = self.text.casefold()
        return (
            (not self.status or row.status == self.status)
            and (self.group is None or row.group == self.group)
            and (not text or text in row.prompt.casefold() or text in row.response.casefold())
            and self._has_reward(row.reward)
        )

    def _has_reward(self, reward: float | None) -> bool:
        if self.min_reward is None and self.max_reward is None:
            return True
        if reward is None:
            return False
        low = float("-inf") if self.min_reward is None else self.min_reward
        high = float("inf") if self.max_reward is None else self.max_reward
        return low <= reward <= high


def search(
    files: SampleFiles,
    kind: str,
    query: Query,
    *,
    before: int | None = None,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Matching samples of the steps below `before`, newest step first.

    Returns `hits` (rows with their `step`), and `next`: the `before` to go on with, None when all
    steps were looked at. At least one step is looked at, however little time there is.
    """
    steps = [s for s in reversed(files.steps(kind)) if before is None or s < before]
    deadline = clock() + seconds
    hits: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        try:
            rows = files.rows(kind, step)
        except NotInRun:
            continue
        hits += [{"step": step, **asdict(row)} for row in rows if query.matches(row)]
        if len(hits) >= MAX_HITS or clock() > deadline:
            return {"hits": hits, "next": step if number + 1 < len(steps) else None}
    return {"hits": hits, "next": None}
