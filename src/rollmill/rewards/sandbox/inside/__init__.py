"""The trusted program inside the sandbox. `run.py` starts it with `python -I -S`.

Reads one JSON request on stdin, writes one JSON line on stdout. It imports the standard library
only, and all of it before it isolates itself; its own files are out of reach after. With isolation
it lives in its own user, mount, process, network and IPC namespaces, in a root of a private tmpfs
with Python's own files bound read-only; each test is a forked process with its own limits, and
everything that a test leaves running is killed before the next one.

It is imported as a package of its own (`inside`, by its folder), so that starting it imports
nothing else of ours: hence the relative imports.
"""

from __future__ import annotations

import json
import os
import sys

from .kernel import PR_SET_DUMPABLE, die_with_parent, drop_privileges, libc
from .namespaces import enter_namespaces, why_not
from .trial import Request, run_tests


def main() -> None:
    """Run the request and answer it."""
    request = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    os.set_inheritable(answer, False)
    die_with_parent(request["parent"])
    if request["isolate"]:
        try:
            enter_namespaces(request["root"], request["readable"], request["disk_mb"])
        except OSError as error:
            reply(answer, {"isolation_error": why_not(error)})
            return
        serve_as_init(request, answer)
    else:
        os.chdir(request["root"])
        reply(answer, {"results": run_tests(request)})


def reply(descriptor: int, message: dict[str, object]) -> None:
    """Write one JSON message."""
    data = json.dumps(message).encode()
    while data:
        data = data[os.write(descriptor, data) :]


def serve_as_init(request: Request, answer: int) -> None:
    """Fork process 1 of the new process namespace; all others end with it."""
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(0)
            drop_privileges()
            libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            reply(answer, {"results": run_tests(request)})
        finally:
            os._exit(0)
    os.close(answer)
    os.close(1)
    os.waitpid(child, 0)
