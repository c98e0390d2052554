"""Which engine gets the next request. Pure.

Load is counted in tokens that are still to be worked on (context plus the most that may be
written), because requests differ by orders of magnitude. Requests of one session (a group, a
conversation) stay on one engine, whose cache then holds their common prefix, unless that
engine is overloaded compared with the least loaded one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

AFFINITY_SLACK = 16
"""A session's engine may be ahead of the least loaded one by this many requests of this size."""
MAX_SESSIONS = 1 << 16
"""Sessions remembered; the longest unused is forgotten first."""


class Balancer:
    """Least outstanding tokens, with session affinity."""

    def __init__(self, *, slack: int = AFFINITY_SLACK, max_sessions: int = MAX_SESSIONS) -> None:
        self._slack = slack
        self._max_sessions = max_sessions
        self._engine_of: OrderedDict[str, int] = OrderedDict()

    def choose(self, loads: Mapping[int, int], session_id: str | None, cost: int) -> int:
        """The engine for a request.

        Args:
            loads: outstanding tokens of every engine that takes requests; not empty.
            session_id: requests with one id keep together.
            cost: tokens of this request.
        """
        least = min(loads, key=lambda engine: (loads[engine], engine))
        if session_id is None:
            return least
        chosen = self._engine_of.get(session_id, least)
        if chosen not in loads or loads[chosen] - loads[least] > self._slack * max(cost, 1):
            chosen = least
        self._remember(session_id, chosen)
        return chosen

    def _remember(self, session_id: str, engine: int) -> None:
        self._engine_of[session_id] = engine
        self._engine_of.move_to_end(session_id)
        if len(self._engine_of) > self._max_sessions:
            self._engine_of.popitem(last=False)
