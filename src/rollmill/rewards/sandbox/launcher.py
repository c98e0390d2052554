"""The trusted program inside the sandbox. Run by path: `python -I -S launcher.py`.

Reads one JSON request on stdin, writes one JSON line on stdout. It imports the standard library
only. With isolation it lives in its own user, mount, process, network and IPC namespaces, in a
root of a private tmpfs with Python's own files bound read-only; each test is a forked process with
its own limits, and everything that a test leaves running is killed before the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
CLONE_OTHERS = 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""New process-id, network, IPC and host-name namespaces."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 4, 38, 24
INNER_ID = 1000
NOBODY = 65534

Request = dict[str, Any]

_libc = ctypes.CDLL(None, use_errno=True)


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
            reply(answer, {"isolation_error": f"{error.strerror} ({error})"})
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


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent (`parent` 0: whoever it is)."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent and os.getppid() != parent:
            os._exit(1)


def checked(result: int, what: str) -> None:
    """Raise OSError when a call of libc failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def enter_namespaces(root: str, readable: list[str], disk_mb: int) -> None:
    """Leave this machine: another root, other ids, no network.

    As root the file tree is built first, with root's right to read Python's files, and the rights
    are given up after; any other user gets the needed rights from a user namespace.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    if os.getuid() == 0:
        checked(_libc.unshare(CLONE_NEWNS), "unshare")
        enter_root(root, readable, disk_mb)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # A change of ids clears both of these.
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        die_with_parent(0)
        enter_user_namespace(proc, CLONE_OTHERS)
    else:
        enter_user_namespace(proc, CLONE_OTHERS | CLONE_NEWNS)
        enter_root(root, readable, disk_mb)
    with contextlib.suppress(OSError):  # no user namespaces inside this one
        write(proc, "sys/user/max_user_namespaces", "0")
    os.close(proc)
    os.chdir("/tmp")


def enter_user_namespace(proc: int, others: int) -> None:
    """Become an ordinary user of a new user namespace, with rights inside it."""
    uid, gid = os.getuid(), os.getgid()
    checked(_libc.unshare(CLONE_NEWUSER | others), "unshare")
    write(proc, "self/setgroups", "deny")
    write(proc, "self/uid_map", f"{INNER_ID} {uid} 1")
    write(proc, "self/gid_map", f"{INNER_ID} {gid} 1")


def enter_root(root: str, readable: list[str], disk_mb: int) -> None:
    """Make the sandbox the root, and let go of the old one."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    build_root(root, readable, disk_mb)
    old = os.path.join(root, "old")
    os.mkdir(old)
    checked(_libc.syscall(ctypes.c_long(pivot_root_number()), root.encode(), old.encode()), "pivot")
    os.chdir("/")
    checked(_libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")


def pivot_root_number() -> int:
    """The number of the system call, which libc does not wrap."""
    machine = os.uname().machine
    numbers = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
    if machine not in numbers:
        raise OSError(38, f"pivot_root is not known for {machine}")
    return numbers[machine]


def build_root(root: str, readable: list[str], disk_mb: int) -> None:
    """A private disk with Python's files, four devices and a folder to work in."""
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_mb}m,mode=755,nr_inodes=4096")
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
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o777)


def bind_read_only(source: str, target: str) -> None:
    """Show a folder of this machine inside, read-only."""
    mount(source, target, None, MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag
    kept = flags & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """Call mount(2)."""
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = _libc.mount(
        arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3]
    )
    checked(result, f"mount {target}")


def write(folder: int, path: str, text: str) -> None:
    """Write a text to a file under an open folder."""
    descriptor = os.open(path, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def serve_as_init(request: Request, answer: int) -> None:
    """Fork process 1 of the new process namespace; all others end with it."""
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(0)
            drop_privileges()
            _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            reply(answer, {"results": run_tests(request)})
        finally:
            os._exit(0)
    os.close(answer)
    os.close(1)
    os.waitpid(child, 0)


def drop_privileges() -> None:
    """No capability, and none to be had."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


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
    with contextlib.suppress(OSError), os.scandir(".") as entries:
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


def become_test(
    program: CodeType,
    test: Request,
    request: Request,
    files: tuple[int, int, int],
    seconds: float,
) -> NoReturn:
    """The forked process of one test: limits, then the program. Never returns."""
    code = 1
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_WRONLY)
        stdin, out, value = (fcntl.fcntl(file, fcntl.F_DUPFD, 16) for file in files)
        for file, number in ((stdin, 0), (out, 1), (null, 2), (value, 3)):
            os.dup2(file, number)
        os.closerange(4, 1024)
        set_limits(request, seconds)
        run_program(program, test)
        sys.stdout.flush()
        code = 0
    except SystemExit as error:
        code = 0 if error.code in (None, 0) else 1
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if "stdin" not in test:
            code = 1  # leaving early is not passing
            with contextlib.suppress(Exception):
                os.write(3, b"the program ended before its test")
    except BaseException as error:  # noqa: BLE001  (told to the grader)
        with contextlib.suppress(Exception):
            line = "".join(traceback.format_exception_only(type(error), error)).strip()
            os.write(3, line[:500].encode("utf-8", "replace"))
    finally:
        os._exit(code)


def set_limits(request: Request, seconds: float) -> None:
    """Limit this process for good."""
    cpu = max(1, int(seconds) + 1)
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    memory = max(used, 64 << 20) + (request["memory_mb"] << 20)
    wanted = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: request["disk_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: request["processes"],
    }
    for kind, limit in wanted.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def run_program(program: CodeType, test: Request) -> None:
    """The answer as the main program; then the call or the assertions of the test."""
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.argv = ["solution.py"]
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    if "stdin" in test:
        exec(program, names)
        return
    names["__name__"] = "solution"
    exec(program, names)
    if "code" in test:
        exec(compile(test["code"], "test.py", "exec"), names)
        os.write(3, test["token"].encode())
        return
    value = find_function(names, test["function"])(*test["arguments"])
    data = json.dumps(value, default=list).encode()
    while data:
        data = data[os.write(3, data) :]


def find_function(names: dict[str, Any], name: str) -> Callable[..., Any]:
    """A function, or a method of the class `Solution`."""
    found: Any = names.get(name)
    if found is None and "Solution" in names:
        found = getattr(names["Solution"](), name, None)
    if not callable(found):
        raise NameError(f"the program has no function {name!r}")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
