"""One program, its tests, one after the other: fork, limit, run, collect, kill what is left."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import tempfile
import time
from types import CodeType
from typing import Any

from .program import become_test

Request = dict[str, Any]


def run_tests(request: Request) -> list[dict[str, object]]:
    """One result per test that fits in the time; the rest are left out."""
    gc.freeze()
    end = time.monotonic() + request["total_s"]
    results: list[dict[str, object]] = []
    try:
        program = compile(request["program"], "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        detail = f"{type(error).__name__}: {error}"
        return [{"status": "error", "detail": detail} for _ in request["tests"]]
    for test in request["tests"]:
        left = end - time.monotonic()
        if left <= 0:
            break
        try:
            result = run_test(program, test, request, min(left, request["test_s"]))
        except OSError as error:  # the disk is full, or no process can be had
            result = {"status": "error", "detail": str(error)}
        results.append(result)
        if request["stop_early"] and result["status"] != "ok":
            break
    return results


def run_test(
    program: CodeType, test: Request, request: Request, seconds: float
) -> dict[str, object]:
    """Fork, limit, run, collect, kill what is left."""
    stdin = file_with(test.get("stdin", "").encode("utf-8", "replace"))
    out_read, out_write = os.pipe()
    value_read, value_write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        become_test(program, test, request, (stdin, out_write, value_write), seconds)
    os.close(stdin)
    os.close(out_write)
    os.close(value_write)
    collected, status = collect(
        child, {out_read: "out", value_read: "value"}, began + seconds, request["output_bytes"]
    )
    kill_all(child, request["isolate"])
    empty_folder()
    result: dict[str, object] = {
        "status": status,
        "stdout": collected["out"].decode("utf-8", "replace"),
        "value": collected["value"].decode("utf-8", "replace"),
        "seconds": round(time.monotonic() - began, 4),
    }
    if status != "ok":
        result["detail"] = result["value"] or status
    return result


def file_with(data: bytes) -> int:
    """A descriptor from which `data` can be read; no name that a test could spoil."""
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(data)
        file.flush()
        descriptor = os.dup(file.fileno())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def empty_folder() -> None:
    """Remove the files that a test left in its folder."""
    # Folders in folders, thousands deep, stay: they take this program's disk, nobody else's.
    with contextlib.suppress(OSError, RecursionError), os.scandir(".") as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def collect(
    child: int, pipes: dict[int, str], deadline: float, limit: int
) -> tuple[dict[str, bytearray], str]:
    """Read the pipes until they close, the time is up, or the output is too long."""
    collected = {name: bytearray() for name in pipes.values()}
    status = ""
    open_pipes = set(pipes)
    exited: int | None = None
    while open_pipes and not status:
        left = deadline - time.monotonic()
        ready = select.select(list(open_pipes), [], [], max(0.0, min(left, 0.05)))[0]
        for pipe in ready:
            data = os.read(pipe, 65536)
            collected[pipes[pipe]] += data
            if not data:
                open_pipes.discard(pipe)
            if len(collected[pipes[pipe]]) > limit:
                status = "output"
        if exited is None:
            done, code = os.waitpid(child, os.WNOHANG)
            exited = code if done else None
        elif not ready:
            break  # it ended; what it left behind may hold the pipes open
        if left <= 0 and exited is None:
            status = "timeout"
    while exited is None and not status:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            exited = code
        elif time.monotonic() > deadline:
            status = "timeout"
        else:
            time.sleep(0.001)
    for pipe in pipes:
        os.close(pipe)
    if not status:
        status = "ok" if exited == 0 else how_it_ended(exited or 0)
    return collected, status


def how_it_ended(wait_status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(wait_status)
    return "error" if code > 0 else f"killed by signal {-code}"


def kill_all(child: int, isolate: bool) -> None:
    """Kill what the test started. As process 1 of the namespace: everything else in it."""
    # Outside a namespace: its group, never everything on the machine.
    target = -1 if isolate and os.getpid() == 1 else -child
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG if target != -1 else 0)[0]:
            pass
