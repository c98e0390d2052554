"""Which processes belong to a folder, and what they hold: for tests of leaks."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(folder: Path) -> list[int]:
    """Process ids whose command line names `folder`, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if str(folder).encode() in command:
            found.append(int(entry.name))
    return found


def children_of(pid: int) -> list[int]:
    """Direct children of a process, of all its threads."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return children


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_open_files(pid: int) -> int:
    """File descriptors that a process holds now."""
    return len(os.listdir(f"/proc/{pid}/fd"))
