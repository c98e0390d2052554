"""Which machine this is, for what only works on one.

Without torch, so that the driver can use it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from functools import lru_cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESS_IDS = Path("/proc/self/ns/pid")


@lru_cache(maxsize=1)
def machine_name() -> str:
    """The same in two processes exactly when they run on one machine and in one container.

    It names the boot of the kernel and the space of process ids. Where /proc hides one of them it
    is left out: a handle of another container then fails when it is opened.
    """
    boot = ids = ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    with contextlib.suppress(OSError):
        ids = os.readlink(PROCESS_IDS)
    return f"{boot}/{ids}"


def is_own_address(host: str) -> bool:
    """Whether a host name or address is one of this machine's; False when it cannot be found."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
