"""Limits that a grading process puts on itself. All are best effort away from Linux."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, its parent, dies."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def limit_memory(extra_mb: int) -> None:
    """Limit this process's address space to what it has now plus `extra_mb` MiB."""
    used = _memory_pages(0)
    if used is None:
        return
    wanted = used * resource.getpagesize() + (extra_mb << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))


def resident_bytes() -> int:
    """Resident memory of this process; 0 where it cannot be told."""
    pages = _memory_pages(1)
    return 0 if pages is None else pages * resource.getpagesize()


def _memory_pages(field: int) -> int | None:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[field])
    except OSError:
        return None
