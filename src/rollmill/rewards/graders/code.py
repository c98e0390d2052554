"""`code`: a Python program against tests, in the sandbox. The reward is the share of tests passed.

Tests come from `metadata.tests`, else from the label:

- `{"inputs": [...], "outputs": [...]}`: stdin and stdout; with `"fn_name"`, arguments and value;
- a list of `{"input": ..., "output": ...}`, each perhaps with `"fn_name"`;
- a list of lines such as `assert f(1) == 2`, or one text with such lines;
- any of these as JSON text.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import textwrap
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rollmill.errors import RewardError
from rollmill.rewards.graders.base import GradingError, Params, Score
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.mathematics.extract import after_thinking
from rollmill.rewards.sandbox.run import (
    GRACE_S,
    Limits,
    SandboxError,
    TestResult,
    isolation_problem,
    run_tests,
)

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t\r]*$", re.DOTALL | re.MULTILINE
)
_PYTHON = ("python", "python3", "py", "")


class CodeParams(Params):
    """Settings of `code`."""

    partial_credit: bool = True
    """Share of tests passed; off, 1 for all tests and 0 otherwise."""
    test_timeout_s: float = Field(2.0, gt=0)
    """Wall time of one test. All tests together must fit in `reward.timeout_s`."""
    memory_mb: int = Field(256, ge=16)
    """Memory of one process, above what Python needs."""
    max_processes: int = Field(16, ge=1)
    """Processes and threads of one test."""
    disk_mb: int = Field(16, ge=1)
    """Disk of one test."""
    output_kb: int = Field(1024, ge=1)
    """Output of one test; more fails it."""
    max_tests: int | None = Field(None, ge=1)
    """Run only the first tests."""
    allow_unisolated: bool = False
    """Run programs without namespaces where this machine does not allow them: with limits on
    memory and time, but with the network and with all files that this user can read and write."""


@dataclass(frozen=True, slots=True)
class Test:
    """What goes into the sandbox, and what must come out (None: the token of an assertion)."""

    __test__ = False

    request: dict[str, Any]
    expected: Any


class CodeGrader:
    """The share of tests that the program passes."""

    def __init__(self, params: CodeParams, timeout_s: float) -> None:
        problem = isolation_problem()
        if problem is not None and not params.allow_unisolated:
            raise RewardError(
                "programs cannot be isolated on this machine, so `code` does not run them",
                where="reward.type: code",
                expected="a Linux that allows user, mount, process and network namespaces",
                found=problem,
                fix="allow them (in containers: --security-opt), or accept the risk with "
                "reward.params.allow_unisolated: true",
            )
        self._params = params
        self._isolate = problem is None
        self._limits = Limits(
            test_s=params.test_timeout_s,
            total_s=max(0.1, timeout_s - GRACE_S) if timeout_s > 2 * GRACE_S else timeout_s / 2,
            memory_mb=params.memory_mb,
            processes=params.max_processes,
            disk_mb=params.disk_mb,
            output_kb=params.output_kb,
        )

    def extract(self, item: RewardInput) -> str | None:
        """The last block of Python, else a response that is a program as a whole."""
        return extract_program(after_thinking(item.response))

    def score(self, answer: str, item: RewardInput) -> Score | None:
        """Run the tests."""
        tests = read_tests(item)[: self._params.max_tests]
        requests = [test.request for test in tests]
        try:
            results = run_tests(
                answer,
                requests,
                self._limits,
                isolate=self._isolate,
                stop_early=not self._params.partial_credit,
            )
        except SandboxError as error:
            raise GradingError(f"the sandbox failed: {error}") from error
        passed = [_passes(test, one) for test, one in zip(tests, results, strict=False)]
        num_passed = sum(passed)
        detail = f"{num_passed} of {len(tests)} tests passed"
        if num_passed < len(tests):
            detail += f"; {_first_failure(passed, results)}"
        share = num_passed / len(tests)
        return Score(share if self._params.partial_credit else float(share == 1.0), detail)


def extract_program(response: str) -> str | None:
    """The program in a response; None when there is none."""
    blocks = [
        (language.lower(), textwrap.dedent(code))  # a block of a list is indented as a whole
        for language, code in _FENCE.findall(response)
        if language.lower() in _PYTHON
    ]
    programs = [code for language, code in blocks if language or is_program(code)]
    if blocks:  # a block without a language may also show how to call it, or its output
        return str((programs or [code for _, code in blocks])[-1])
    return response if "```" not in response and is_program(response) else None


def is_program(text: str) -> bool:
    """Whether a text is Python that does something."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(statement, ast.Expr) for statement in tree.body) or any(
        isinstance(node, ast.Call) for node in ast.walk(tree)
    )


def read_tests(item: RewardInput) -> list[Test]:
    """The tests of a row.

    Raises:
        GradingError: there are none, or their form is unknown.
    """
    given = item.metadata.get("tests", item.label)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = [given]
    if isinstance(given, dict):
        tests = _from_columns(given)
    elif isinstance(given, list):
        tests = [_from_row(row) for row in given]
    else:
        tests = []
    if not tests:
        raise GradingError(f"expected tests in metadata.tests or the label, found {given!r:.200}")
    return tests


def _from_columns(given: dict[str, Any]) -> list[Test]:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise GradingError("expected tests with `inputs` and `outputs` of the same length")
    name = given.get("fn_name")
    rows = zip(inputs, outputs, strict=True)
    return [_from_row({"input": one, "output": other, "fn_name": name}) for one, other in rows]


def _from_row(row: Any) -> Test:
    if isinstance(row, str):
        token = secrets.token_hex(16)
        return Test({"code": row, "token": token}, token)
    if not isinstance(row, dict) or "input" not in row or "output" not in row:
        raise GradingError(f"expected a test with `input` and `output`, found {row!r:.200}")
    name = row.get("fn_name")
    if name is None:
        return Test({"stdin": _text(row["input"])}, _text(row["output"]))
    arguments = row["input"] if isinstance(row["input"], list) else [row["input"]]
    return Test({"function": str(name), "arguments": arguments}, row["output"])


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _passes(test: Test, result: TestResult) -> bool:
    if result.status != "ok":
        return False
    if "stdin" in test.request:
        return _lines(result.stdout) == _lines(test.expected)
    if "code" in test.request:
        return bool(result.value == test.expected)
    try:
        value = json.loads(result.value)
    except (ValueError, RecursionError):
        return False
    return _same(value, test.expected)


def _lines(text: str) -> list[str]:
    """Lines without the spaces at their ends and the empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same(value: Any, expected: Any) -> bool:
    """Equal values; floats to a part in 10^9; true is not 1."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        if not isinstance(value, int | float) or not isinstance(expected, int | float):
            return False
        return bool(value == expected or abs(value - expected) <= 1e-9 * max(1.0, abs(expected)))
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == {str(key) for key in expected} and all(
            _same(value[str(key)], other) for key, other in expected.items()
        )
    return bool(value == expected)


def _first_failure(passed: list[bool], results: list[TestResult]) -> str:
    if False not in passed:
        return "no time for the others"
    place = passed.index(False)
    result = results[place]
    told = "wrong result" if result.status == "ok" else result.detail or result.status
    return f"test {place + 1}: {told[:300]}"
