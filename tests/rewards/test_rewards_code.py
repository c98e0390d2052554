"""The `code` grader: which program it takes from an answer, what it makes of its tests."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from rollmill.config.reward import RewardConfig
from rollmill.errors import RewardError
from rollmill.rewards.graders import code
from rollmill.rewards.graders.code import CodeGrader, CodeParams, extract_program
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.judging import judge_with
from rollmill.rewards.sandbox.run import isolation_problem

needs_isolation = pytest.mark.skipif(
    isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}"
)


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


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare(1), of util-linux")
@needs_isolation
def test_where_namespaces_are_not_allowed_the_error_says_what_to_allow() -> None:
    """For real: in a namespace of its own, in which no further ones may be made."""
    script = (
        "from rollmill.rewards.graders.code import CodeGrader, CodeParams\n"
        "from rollmill.errors import RewardError\n"
        "try:\n    CodeGrader(CodeParams(), 5.0)\n"
        "except RewardError as error:\n    print(error)\n"
    )
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
    unshare = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{forbid} && exec "$@"', "sh"]

    done = subprocess.run(
        [*unshare, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "user.max_user_namespaces" in done.stdout
    assert "allow_unisolated" in done.stdout


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare(1), of util-linux")
@needs_isolation
def test_the_root_of_a_container_without_other_users_can_isolate_programs() -> None:
    script = (
        "import os\nfrom rollmill.rewards.sandbox.run import Limits, run_tests\n"
        "print(os.getuid(), run_tests('import os; print(os.getuid())', [{'stdin': ''}], Limits()))"
    )

    told = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout

    assert told.startswith("0 ")
    assert "stdout='1000" in told


@needs_isolation
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
