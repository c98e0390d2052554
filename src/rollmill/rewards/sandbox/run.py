"""Starting the sandbox and reading what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_START = "import sys; sys.path[:0] = sys.argv[1:]; import inside; del sys.path[0]; inside.main()"
GRACE_S = 1.0
"""Time that starting and ending the sandbox may take beside the tests."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(Exception):
    """The sandbox could not be set up; nothing was run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a run.

    Attributes:
        test_s: wall time of one test.
        total_s: wall time of all tests of one program.
        memory_mb: address space of one process, above Python's own.
        processes: processes and threads of a test, itself included.
        disk_mb: size of its disk and of one file.
        output_kb: output of one test.
    """

    test_s: float = 2.0
    total_s: float = 4.0
    memory_mb: int = 256
    processes: int = 16
    disk_mb: int = 16
    output_kb: int = 1024


@dataclass(frozen=True, slots=True)
class TestResult:
    """What one test gave: `ok`, `error`, `timeout`, `output`, or the signal that ended it."""

    __test__ = False

    status: str
    stdout: str = ""
    value: str = ""
    detail: str = ""


def run_tests(
    program: str,
    tests: list[dict[str, Any]],
    limits: Limits,
    *,
    isolate: bool = True,
    stop_early: bool = False,
) -> list[TestResult]:
    """Run `program` once per test; results in order, fewer than tests when time ran out.

    A test is `{stdin}`, `{function, arguments}` or `{code, token}`.

    Raises:
        SandboxError: this machine does not allow the isolation, or the program inside failed.
    """
    with tempfile.TemporaryDirectory(
        prefix="rollmill-sandbox-", ignore_cleanup_errors=True
    ) as root:
        request = {
            "program": program,
            "tests": tests,
            "isolate": isolate,
            "root": root,
            "readable": readable_folders() if isolate else [],
            "parent": os.getpid(),
            "test_s": limits.test_s,
            "total_s": limits.total_s,
            "memory_mb": limits.memory_mb,
            "processes": limits.processes,
            "disk_mb": limits.disk_mb,
            "output_bytes": limits.output_kb << 10,
            "stop_early": stop_early,
        }
        answer = _launch(json.dumps(request).encode(), limits.total_s + GRACE_S, root)
    if "isolation_error" in answer:
        raise SandboxError(answer["isolation_error"])
    return [
        TestResult(
            result["status"],
            result.get("stdout", ""),
            result.get("value", ""),
            str(result.get("detail", "")),
        )
        for result in answer.get("results", ())
    ]


def _launch(request: bytes, timeout_s: float, root: str) -> dict[str, Any]:
    command = [sys.executable, "-I", "-S", "-B", "-c", _START, str(Path(__file__).parent)]
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            timeout=timeout_s,
            env=_ENVIRONMENT,
            cwd=root,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"results": []}
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        told = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise SandboxError(
            f"the program inside ended with {done.returncode}: {told[-1] if told else 'no message'}"
        ) from error
    if not isinstance(answer, dict):
        raise SandboxError("the program inside's answer is malformed")
    return answer


@lru_cache(maxsize=1)
def readable_folders() -> list[str]:
    """Folders that a program can read: Python's standard library and the system's libraries."""
    standard = sysconfig.get_path("stdlib")
    binary = sysconfig.get_config_var("DESTSHARED") or f"{standard}/lib-dynload"
    libraries = sysconfig.get_config_var("LIBDIR")
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    found: list[str] = []
    for folder in [*system, standard, binary, *([libraries] if libraries else [])]:
        path = str(folder)
        inside = any(Path(path).is_relative_to(one) and path != one for one in found)
        if path not in found and not inside and os.path.isdir(path):
            found.append(path)
    return found


@lru_cache(maxsize=1)
def isolation_problem() -> str | None:
    """Why programs cannot be isolated on this machine; None when they can."""
    if sys.platform != "linux":
        return f"namespaces are Linux's; this is {sys.platform}"
    try:
        results = run_tests("print('ok')", [{"stdin": ""}], Limits(total_s=5.0))
    except SandboxError as error:
        return str(error)
    is_fine = bool(results) and results[0].stdout.strip() == "ok"
    return None if is_fine else f"a trial program failed: {results}"
