"""What the viewer refuses, in two kinds: what stops `rollmill view`, and what one request gets."""

from __future__ import annotations

from rollmill.errors import RollmillError


class ViewerError(RollmillError):
    """The viewer cannot be started as asked."""


class NotInRun(Exception):
    """A request names a step, sample or file that the run does not have (any more)."""
