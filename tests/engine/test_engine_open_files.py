"""The system's limit on open files, in processes of their own: it cannot be raised again."""

import subprocess
import sys

import pytest

LIMITED = """
import resource, sys
from rollmill.engine.open_files import make_room
from rollmill.errors import ConfigError
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    make_room(wanted, where="engine.max_concurrent_requests")
except ConfigError as error:
    print(error)
else:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "found"),
    [
        (256, 8192, 1024, "8192 8192"),
        (8192, 8192, 1024, "8192 8192"),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_and_never_lowered(
    soft: int, hard: int, wanted: int, found: str
) -> None:
    assert limited(soft, hard, wanted) == found


def test_more_connections_than_may_be_opened_are_refused() -> None:
    message = limited(256, 1000, 1024)
    assert "engine.max_concurrent_requests" in message
    assert "at most 936: the hard limit of open files is 1000" in message


def limited(*numbers: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, numbers)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
