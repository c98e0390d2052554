"""The sandbox of `code`: what programs must not be able to do."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollmill
from rollmill.rewards.sandbox.run import Limits, TestResult, isolation_problem, run_tests

pytestmark = pytest.mark.skipif(
    isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}"
)
STDIN: dict[str, Any] = {"stdin": ""}
LIMITS = {
    "test_s": 1.0,
    "total_s": 3.0,
    "memory_mb": 128,
    "processes": 8,
    "disk_mb": 4,
    "output_kb": 64,
}
ORDINARY_USER = 54321
PYTHONS = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
Run = Callable[..., list[TestResult]]


def run_here(program: str, *tests: dict[str, Any], **limits: float) -> list[TestResult]:
    wanted: dict[str, Any] = LIMITS | limits
    return run_tests(program, list(tests) or [STDIN], Limits(**wanted))


def run_as_ordinary_user(program: str, *tests: dict[str, Any], **limits: float) -> list[TestResult]:
    """From a process that has given up root for good; its Python is one that it may run."""
    python = ordinary_python()
    if os.getuid() != 0 or python is None:
        pytest.skip("needs root, and a Python ≥ 3.11 and this package where any user can read them")
    wanted = LIMITS | limits
    request = {"program": program, "tests": list(tests) or [STDIN], "limits": wanted}
    done = as_ordinary_user(python, input=json.dumps(request))
    answer = json.loads(done.stdout)
    assert answer["problem"] is None
    return [TestResult(**result) for result in answer["results"]]


def as_ordinary_user(python: str, input: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-P", str(Path(__file__).with_name("sandbox_as_user.py"))],
        input=input,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        user=ORDINARY_USER,
        group=ORDINARY_USER,
        extra_groups=[],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path(rollmill.__file__).parents[1])},
    )


@functools.cache
def ordinary_python() -> str | None:
    for python in PYTHONS:
        try:
            if as_ordinary_user(python, input="{}").returncode == 0:
                return python
        except OSError:
            continue
    return None


@pytest.fixture(
    params=[run_here, run_as_ordinary_user], ids=["as this user", "as an ordinary user"]
)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a program in the sandbox; every attack is made from both sides."""
    chosen: Run = request.param
    return chosen


def processes_named(text: str) -> list[int]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in command.read_bytes():
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found


def test_a_program_runs_and_sees_its_input(run: Run) -> None:
    results = run("print(int(input()) * 2)", {"stdin": "4\n"}, {"stdin": "5\n"})

    assert [(r.status, r.stdout) for r in results] == [("ok", "8\n"), ("ok", "10\n")]


def test_the_standard_library_is_there(run: Run) -> None:
    program = "import math, json, heapq, decimal, random, datetime, sqlite3\nprint(math.comb(5, 2))"

    assert run(program)[0].stdout == "10\n"


def test_a_fork_bomb_is_contained_and_nothing_of_it_is_left(run: Run) -> None:
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    before = len(list(Path("/proc").glob("[0-9]*")))

    results = run(bomb, STDIN, STDIN)

    assert [r.status for r in results] == ["timeout", "timeout"]
    assert not processes_named("import inside")
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 50


def test_processes_and_threads_are_limited(run: Run) -> None:
    program = (
        "import os, time\nforked = 0\ntry:\n    while True:\n        if os.fork() == 0:\n"
        "            time.sleep(5)\n            os._exit(0)\n        forked += 1\n"
        "except OSError:\n    print(forked)\n"
    )

    assert 0 < int(run(program)[0].stdout) <= 8


def test_a_memory_bomb_is_contained(run: Run) -> None:
    patient = {"test_s": 20.0, "total_s": 30.0}  # the memory is to end it, not the time
    result = run("data = []\nwhile True:\n    data.append(bytearray(10**7))", **patient)[0]

    assert result.status != "ok"
    assert "MemoryError" in result.detail


def test_infinite_output_is_cut(run: Run) -> None:
    start = time.monotonic()
    result = run("while True: print('x' * 10000)")[0]

    assert result.status == "output"
    assert len(result.stdout) < 10 << 16
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "path", ["/etc/x", "/usr/lib/x", "/x", "/dev/x", "/proc/x", "/../x", f"{Path.home()}/x"]
)
def test_nothing_can_be_written_outside(run: Run, path: str) -> None:
    result = run(f"open({path!r}, 'w').write('x')")[0]

    assert not Path(path).exists()
    assert result.status == "error"


def test_files_of_this_machine_cannot_be_read(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    secret.chmod(0o644)

    for path in (str(secret), "/etc/passwd", "/proc/1/environ", __file__):
        assert run(f"print(open({path!r}).read())")[0].status == "error", path


def test_the_disk_is_limited_in_file_size_and_in_all(run: Run) -> None:
    big = "open('big', 'wb').write(bytes(10**8))"
    many = "for k in range(100): open(str(k), 'wb').write(bytes(10**6))"

    for program in (big, many):
        assert run(program)[0].status == "error"


def test_a_test_finds_no_files_of_the_one_before(run: Run) -> None:
    program = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')\nos.mkdir('d')"

    assert [r.stdout for r in run(program, STDIN, STDIN)] == ["[]\n", "[]\n"]


@pytest.mark.parametrize("address", ["('127.0.0.1', 80)", "('1.1.1.1', 53)"])
def test_there_is_no_network(run: Run, address: str) -> None:
    program = f"import socket\ns = socket.socket()\ns.settimeout(1)\ns.connect({address})"

    assert "unreachable" in run(program)[0].detail


def test_sockets_of_this_machine_are_out_of_reach(run: Run, tmp_path: Path) -> None:
    program = (
        "import socket\ns = socket.socket(socket.AF_UNIX)\n"
        "s.connect('\\0rollmill-test-socket')\nprint('reached')"
    )
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0rollmill-test-socket")
        listener.listen()
        assert run(program)[0].status == "error"


def test_the_environment_is_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "do not show")

    result = run("import os\nprint(dict(os.environ))")[0]

    assert "PATH" in result.stdout
    assert "MY_SECRET_TOKEN" not in result.stdout


def test_other_processes_cannot_be_seen_or_killed(run: Run) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    program = f"import os\ntry:\n    os.kill({sleeper.pid}, 9)\nexcept OSError as e:\n    print(e)"

    result = run(program + "\nos.kill(-1, 9)")[0]

    assert result.status in ("ok", "error", "killed by signal 9")
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_there_are_no_privileges_to_be_had(run: Run) -> None:
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "mounted = libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)\n"
        "print(os.getuid() != 0, libc.unshare(0x10000000), mounted)"
    )

    assert run(program)[0].stdout == "True -1 -1\n"


def test_a_process_left_behind_does_not_outlive_its_test(run: Run) -> None:
    program = (
        "import os, time\nif os.fork():\n    print('parent')\nelse:\n    os.setsid()\n"
        "    time.sleep(60)\n"
    )

    start = time.monotonic()
    assert run(program)[0].stdout == "parent\n"
    assert time.monotonic() - start < 5


def test_a_hanging_test_does_not_take_the_time_of_the_others(run: Run) -> None:
    program = "if input() == 'hang':\n    while True: pass\nprint('done')"

    results = run(program, {"stdin": "hang"}, {"stdin": "go"})

    assert [r.status for r in results] == ["timeout", "ok"]


def test_the_sandbox_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    mark = f"rollmill-mark-{os.getpid()}"
    script = tmp_path / "starts.py"
    script.write_text(
        "from rollmill.rewards.sandbox.run import Limits, run_tests\n"
        f"# {mark}\n"
        "run_tests('while True: pass', [{'stdin': ''}], Limits(test_s=50, total_s=50))\n"
    )
    starter = subprocess.Popen([sys.executable, str(script)])
    deadline = time.monotonic() + 20

    def launchers() -> list[int]:
        return [
            pid
            for pid in processes_named("import inside")
            if f"PPid:\t{starter.pid}\n" in Path(f"/proc/{pid}/status").read_text()
        ]

    while not (found := launchers()) and time.monotonic() < deadline:
        os.sched_yield()
    starter.kill()
    starter.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in found) and time.monotonic() < deadline:
        os.sched_yield()

    assert found
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)


def test_a_program_that_nests_folders_is_wrong_and_the_next_test_runs() -> None:
    program = (
        "import os\n"
        "if input() == 'nest':\n"
        "    for _ in range(2000):\n        os.mkdir('d'); os.chdir('d')\n"
        "print('done')\n"
    )

    results = run_here(program, {"stdin": "nest\n"}, {"stdin": "go\n"}, test_s=5.0, total_s=20.0)

    assert [result.stdout for result in results] == ["done\n", "done\n"]
