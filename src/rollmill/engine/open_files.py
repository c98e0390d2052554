"""Room for thousands of connections: by itself a process may often open 1,024 files only.

Every request in flight is a connection, and a connection is an open file. Without room, requests
fail one after the other with "too many open files", as if engines were broken.
"""

from __future__ import annotations

import resource

from rollmill.errors import ConfigError

MANY_FILES = 65536
"""Enough for every engine and driver that one machine can feed."""
OTHER_FILES = 64
"""Files that a driver needs besides its requests: logs, workers' sockets, data."""


def raise_limit() -> None:
    """Let this process, and those that it starts, open many files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_room(num_connections: int, *, where: str) -> None:
    """Raise the limit, and see that so many connections at once fit.

    Args:
        num_connections: to engines.
        where: the field that asks for them, for the error.

    Raises:
        ConfigError: the system's hard limit is lower.
    """
    raise_limit()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < num_connections + OTHER_FILES:
        raise ConfigError(
            "more connections than this system lets a process open",
            where=where,
            expected=f"at most {limit - OTHER_FILES}: the hard limit of open files is {limit}",
            found=str(num_connections),
            fix="raise the limit (`ulimit -Hn`, or nofile in limits.conf), or lower the number",
        )
