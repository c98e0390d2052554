"""The sandbox of `code`: what programs must not be able to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollmill.config.reward import RewardConfig
from rollmill.errors import RewardError
from rollmill.rewards.graders import code
from rollmill.rewards.graders.code import CodeGrader, CodeParams, extract_program
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.judging import judge_with
from rollmill.rewards.sandbox.run import Limits, TestResult, isolation_problem, run_tests

pytestmark = pytest.mark.skipif(
    isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}"
)
STDIN: dict[str, Any] = {"stdin": ""}
QUICK = Limits(test_s=1.0, total_s=3.0, memory_mb=128, processes=8, disk_mb=4, output_kb=64)


def run(program: str, *tests: dict[str, Any], limits: Limits = QUICK) -> list[TestResult]:
    return run_tests(program, list(tests) or [STDIN], limits)


def processes_named(text: str) -> list[int]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in command.read_bytes():
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found


def test_a_program_runs_and_sees_its_input() -> None:
    results = run("print(int(input()) * 2)", {"stdin": "4\n"}, {"stdin": "5\n"})

    assert [(r.status, r.stdout) for r in results] == [("ok", "8\n"), ("ok", "10\n")]


def test_the_standard_library_is_there() -> None:
    program = "import math, json, heapq, decimal, random, datetime, sqlite3\nprint(math.comb(5, 2))"

    assert run(program)[0].stdout == "10\n"


def test_a_fork_bomb_is_contained_and_nothing_of_it_is_left() -> None:
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    before = len(list(Path("/proc").glob("[0-9]*")))

    results = run(bomb, STDIN, STDIN)

    assert [r.status for r in results] == ["timeout", "timeout"]
    assert not processes_named("launcher.py")
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 50


def test_processes_and_threads_are_limited() -> None:
    program = (
        "import os, time\nforked = 0\ntry:\n    while True:\n        if os.fork() == 0:\n"
        "            time.sleep(5)\n            os._exit(0)\n        forked += 1\n"
        "except OSError:\n    print(forked)\n"
    )

    assert 0 < int(run(program)[0].stdout) <= 8


def test_a_memory_bomb_is_contained() -> None:
    result = run("data = []\nwhile True:\n    data.append(bytearray(10**7))")[0]

    assert result.status != "ok"
    assert "MemoryError" in result.detail


def test_infinite_output_is_cut() -> None:
    start = time.monotonic()
    result = run("while True: print('x' * 10000)")[0]

    assert result.status == "output"
    assert len(result.stdout) < 10 << 16
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "path", ["/etc/x", "/usr/lib/x", "/x", "/dev/x", "/proc/x", "/../x", f"{Path.home()}/x"]
)
def test_nothing_can_be_written_outside(path: str) -> None:
    result = run(f"open({path!r}, 'w').write('x')")[0]

    assert not Path(path).exists()
    assert result.status == "error" or path in ("/x", "/../x")


def test_files_of_this_machine_cannot_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    secret.chmod(0o644)

    for path in (str(secret), "/etc/passwd", "/proc/1/environ", __file__):
        assert run(f"print(open({path!r}).read())")[0].status == "error", path


def test_the_disk_is_limited_in_file_size_and_in_all() -> None:
    big = "open('big', 'wb').write(bytes(10**8))"
    many = "for k in range(100): open(str(k), 'wb').write(bytes(10**6))"

    for program in (big, many):
        assert run(program)[0].status == "error"


def test_a_test_finds_no_files_of_the_one_before() -> None:
    program = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')\nos.mkdir('d')"

    assert [r.stdout for r in run(program, STDIN, STDIN)] == ["[]\n", "[]\n"]


@pytest.mark.parametrize("address", ["('127.0.0.1', 80)", "('1.1.1.1', 53)"])
def test_there_is_no_network(address: str) -> None:
    program = f"import socket\ns = socket.socket()\ns.settimeout(1)\ns.connect({address})"

    assert "unreachable" in run(program)[0].detail


def test_sockets_of_this_machine_are_out_of_reach(tmp_path: Path) -> None:
    program = (
        "import socket\ns = socket.socket(socket.AF_UNIX)\n"
        "s.connect('\\0rollmill-test-socket')\nprint('reached')"
    )
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0rollmill-test-socket")
        listener.listen()
        assert run(program)[0].status == "error"


def test_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "do not show")

    result = run("import os\nprint(dict(os.environ))")[0]

    assert "PATH" in result.stdout
    assert "MY_SECRET_TOKEN" not in result.stdout


def test_other_processes_cannot_be_seen_or_killed() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    program = f"import os\ntry:\n    os.kill({sleeper.pid}, 9)\nexcept OSError as e:\n    print(e)"

    result = run(program + "\nos.kill(-1, 9)")[0]

    assert result.status in ("ok", "error", "killed by signal 9")
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_there_are_no_privileges_to_be_had() -> None:
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "mounted = libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)\n"
        "print(os.getuid() != 0, libc.unshare(0x10000000), mounted)"
    )

    assert run(program)[0].stdout == "True -1 -1\n"


def test_a_process_left_behind_does_not_outlive_its_test() -> None:
    program = (
        "import os, time\nif os.fork():\n    print('parent')\nelse:\n    os.setsid()\n"
        "    time.sleep(60)\n"
    )

    start = time.monotonic()
    assert run(program)[0].stdout == "parent\n"
    assert time.monotonic() - start < 5


def test_a_hanging_test_does_not_take_the_time_of_the_others() -> None:
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
            for pid in processes_named("launcher.py")
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


def test_without_isolation_code_is_refused_unless_the_config_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code, "isolation_problem", lambda: "namespaces are not allowed")

    with pytest.raises(RewardError, match="allow_unisolated"):
        CodeGrader(CodeParams(), 5.0)

    grader = CodeGrader(CodeParams(allow_unisolated=True), 5.0)
    item = RewardInput(
        response="```python\nprint(int(input()) + 1)\n```",
        label={"inputs": ["1", "2"], "outputs": ["2", "3"]},
    )
    assert judge_with(grader, item).reward == 1.0


def test_all_or_nothing_can_be_asked_for() -> None:
    item = RewardInput(
        response="```python\nprint(2)\n```", label={"inputs": ["", ""], "outputs": ["2", "3"]}
    )

    assert judge_with(CodeGrader(CodeParams(), 5.0), item).reward == 0.5
    strict = CodeGrader(CodeParams(partial_credit=False), RewardConfig().timeout_s)
    assert judge_with(strict, item).reward == 0.0


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\nand\n```py\nb\n```", "b\n"),
        ("```\nc\n```", "c\n"),
        ("```python\nd\n```\n```bash\nls\n```", "d\n"),
        ("```rust\nfn main() {}\n```", None),
        ("print(1)", "print(1)"),
        ("Just some words here", None),
        ("word", None),
        ("", None),
    ],
)
def test_the_last_python_block_is_the_program(response: str, program: str | None) -> None:
    assert extract_program(response) == program
