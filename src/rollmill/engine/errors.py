"""Why a call to an engine failed, as types that policy can tell apart.

Everything here is an `EngineError`; `kind` is the short name under which metrics and ledgers count
the failure. The invariant: whatever an engine does (refuses, dies, hangs, talks nonsense), the
caller sees one of these or a complete, checked result.
"""

from __future__ import annotations

from typing import ClassVar

from rollmill.errors import EngineError


class EngineCallError(EngineError):
    """A call to an engine failed; the subclasses say how."""

    kind: ClassVar[str] = "engine_error"


class EngineUnreachable(EngineCallError):
    """No connection, or it broke before the answer was complete, on every try."""

    kind = "unreachable"


class EngineTimeout(EngineCallError):
    """No answer within the deadline."""

    kind = "timeout"


class EngineRefused(EngineCallError):
    """The engine answered 4xx: the request itself is wrong, so it is never sent again.

    Attributes:
        status: the HTTP status.
    """

    kind = "refused"
    status = 400


class OtherBase(EngineCallError):
    """The engine's weights are not those that an update by difference starts from."""

    kind = "other_base"


class EngineFailed(EngineCallError):
    """The engine answered 5xx: it had a fault of its own while serving the request."""

    kind = "failed"


class MalformedAnswer(EngineCallError):
    """The engine answered 200 with something that is not a valid answer."""

    kind = "malformed_answer"


class WrongVersion(EngineCallError):
    """The tokens were written by weights of another version than expected."""

    kind = "wrong_version"


class EngineLost(EngineCallError):
    """The engine died with the request in flight, and no other engine could take it over."""

    kind = "lost"


class EngineStartError(EngineCallError):
    """An engine process could not be started."""

    kind = "start_failed"
