"""Calls of the kernel that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 4, 38, 24

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raise OSError when a call of libc failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent (`parent` 0: whoever it is)."""
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent and os.getppid() != parent:
            os._exit(1)


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """Call mount(2)."""
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = libc.mount(
        arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3]
    )
    checked(result, f"mount {target}")


def pivot_root_number() -> int:
    """The number of the system call, which libc does not wrap."""
    machine = os.uname().machine
    numbers = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
    if machine not in numbers:
        raise OSError(38, f"pivot_root is not known for {machine}")
    return numbers[machine]


def drop_privileges() -> None:
    """No capability, and none to be had."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
