"""Leaving this machine: another root, other ids, no network, no privileges.

Linux's namespaces. The new root is a private tmpfs with Python's own files bound read-only; what
runs in it is an ordinary user who can see nothing else of this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from .kernel import (
    PR_SET_DUMPABLE,
    checked,
    die_with_parent,
    libc,
    mount,
    pivot_root_number,
)

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
CLONE_OTHERS = 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""New process-id, network, IPC and host-name namespaces."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
INNER_ID = 1000
NOBODY = 65534


def enter_namespaces(root: str, readable: list[str], disk_mb: int) -> None:
    """Leave this machine: another root, other ids, no network.

    As root the file tree is built first, with root's right to read Python's files, and the rights
    are given up after; any other user (and the root of a container that has no other user) gets
    the needed rights from a user namespace.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    if os.getuid() == 0 and is_mapped(proc, NOBODY):
        checked(libc.unshare(CLONE_NEWNS), "unshare")
        enter_root(root, readable, disk_mb)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # A change of ids clears both of these.
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        die_with_parent(0)
        enter_user_namespace(proc, CLONE_OTHERS)
    else:
        enter_user_namespace(proc, CLONE_OTHERS | CLONE_NEWNS)
        enter_root(root, readable, disk_mb)
    with contextlib.suppress(OSError):  # no user namespaces inside this one
        write(proc, "sys/user/max_user_namespaces", "0")
    os.close(proc)
    os.chdir("/tmp")


def is_mapped(proc: int, user: int) -> bool:
    """Whether a user exists here; in a container that maps only its root, no other does."""
    with open(os.open("self/uid_map", os.O_RDONLY, dir_fd=proc)) as uid_map:
        ranges = [[int(field) for field in line.split()] for line in uid_map]
    return any(first <= user < first + length for first, _, length in ranges)


def why_not(error: OSError) -> str:
    """Why this machine did not allow the isolation, for whoever looks after it."""
    told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if error.errno == errno.ENOSPC:
        return f"{told} (the sysctl user.max_user_namespaces is 0, or all are in use)"
    if error.errno in (errno.EPERM, errno.EACCES):
        return (
            f"{told} (a container's seccomp or AppArmor profile, or one of the sysctls "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
        )
    return told


def enter_user_namespace(proc: int, others: int) -> None:
    """Become an ordinary user of a new user namespace, with rights inside it."""
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(CLONE_NEWUSER | others), "unshare")
    write(proc, "self/setgroups", "deny")
    write(proc, "self/uid_map", f"{INNER_ID} {uid} 1")
    write(proc, "self/gid_map", f"{INNER_ID} {gid} 1")


def enter_root(root: str, readable: list[str], disk_mb: int) -> None:
    """Make the sandbox the root, and let go of the old one."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    build_root(root, readable, disk_mb)
    old = os.path.join(root, "old")
    os.mkdir(old)
    checked(libc.syscall(ctypes.c_long(pivot_root_number()), root.encode(), old.encode()), "pivot")
    os.chdir("/")
    checked(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    # An ordinary user owns this root: nothing but /tmp may be a place to leave things.
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def build_root(root: str, readable: list[str], disk_mb: int) -> None:
    """A root with Python's files and four devices, and a private disk to work in."""
    private = MS_NOSUID | MS_NODEV
    mount("tmpfs", root, "tmpfs", private, "size=1m,mode=755,nr_inodes=4096")
    for folder in readable:
        if os.path.islink(folder):
            target = root + folder
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not os.path.lexists(target):
                os.symlink(os.readlink(folder), target)
        elif os.path.isdir(folder) and not os.path.lexists(root + folder):
            os.makedirs(root + folder)
            bind_read_only(folder, root + folder)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for device in ("null", "zero", "urandom", "random"):
        with open(f"{root}/dev/{device}", "w"):
            pass
        mount(f"/dev/{device}", f"{root}/dev/{device}", None, MS_BIND)
    os.mkdir(f"{root}/tmp")
    mount("tmpfs", f"{root}/tmp", "tmpfs", private, f"size={disk_mb}m,mode=777,nr_inodes=4096")


def bind_read_only(source: str, target: str) -> None:
    """Show a folder of this machine inside, read-only."""
    mount(source, target, None, MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag
    kept = flags & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def write(folder: int, path: str, text: str) -> None:
    """Write a text to a file under an open folder."""
    descriptor = os.open(path, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
