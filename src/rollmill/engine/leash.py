"""`python -m rollmill.engine.leash COMMAND...`: become COMMAND, killed when the parent dies.

For servers that are not ours (the SGLang router) and do not watch their standard input. The
kernel sends the signal (Linux's parent-death signal, which survives exec); elsewhere COMMAND runs
without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    """Replace this process by `command`; returns only by raising."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
