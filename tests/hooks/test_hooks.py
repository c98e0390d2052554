"""Loading users' functions: what is found, and what is said when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.errors import HookError
from rollmill.hooks import HookSignature, load_hook

ONE = HookSignature(("sample: Sample",), "float")
SOURCE = """
VALUE = 3
def good(sample): return 1.0
def with_default(sample, extra=1): return 2.0
async def waits(sample): return 3.0
def two(a: int, b: str) -> float: return 4.0
class Judge:
    @staticmethod
    def inner(sample): return 5.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "neighbour.py").write_text("from mine import good as good\n")
    return tmp_path


def load(path: str, folder: Path, expected: HookSignature | None = ONE) -> object:
    return load_hook(path, base_dir=folder, expected=expected, name="reward.function")


@pytest.mark.parametrize("name", ["good", "with_default", "waits", "Judge.inner"])
def test_a_function_is_found_in_a_file_beside_the_configuration(folder: Path, name: str) -> None:
    assert callable(load(f"mine.py:{name}", folder))


def test_a_function_is_found_in_an_absolute_file_and_in_a_module(folder: Path) -> None:
    assert callable(load(f"{folder}/mine.py:good", Path("/")))
    assert callable(load("json:dumps", folder))


def test_functions_of_one_file_share_its_module(folder: Path) -> None:
    first = load("mine.py:good", folder)
    second = load("mine.py:with_default", folder)

    assert first.__globals__ is second.__globals__  # type: ignore[attr-defined]


def test_a_hook_can_import_its_neighbours(folder: Path) -> None:
    assert callable(load("neighbour.py:good", folder))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("mine.py:goood", "did you mean 'good'?"),
        ("mime.py:good", "did you mean 'mine.py'?"),
        ("mine.py:VALUE", "is int"),
        ("mine.py", "`module:function` or `file.py:function`"),
        ("no_such_module:f", "no module named 'no_such_module'"),
        ("broken.py:f", "RuntimeError: at import"),
        ("mine.py:two", "def two(a: int, b: str) -> float"),
    ],
)
def test_what_is_wrong_is_told(folder: Path, path: str, told: str) -> None:
    with pytest.raises(HookError) as caught:
        load(path, folder)

    assert told in str(caught.value)
    assert "reward.function" in str(caught.value)


def test_the_expected_signature_is_shown(folder: Path) -> None:
    with pytest.raises(HookError, match="expected: def two\\(sample: Sample\\) -> float"):
        load("mine.py:two", folder)


@pytest.mark.parametrize(("kind", "wrong"), [("sync", "waits"), ("async", "good")])
def test_the_wrong_kind_of_function_is_refused(folder: Path, kind: str, wrong: str) -> None:
    expected = HookSignature(("sample",), "float", kind)  # type: ignore[arg-type]

    with pytest.raises(HookError, match=wrong):
        load(f"mine.py:{wrong}", folder, expected)


def test_a_signature_can_be_taken_from_an_example() -> None:
    def example(a: int, b: str) -> float: ...  # type: ignore[empty-body]

    shown = HookSignature.like(example).render("mine")

    assert shown == "def mine(a: int, b: str) -> float"


@pytest.mark.parametrize(
    ("source", "line", "said"),
    [
        ("x = 1\ndef f(sample)\n    return 1.0\n", 2, "SyntaxError"),
        ("import no_such_module_anywhere\n", 1, "No module named"),
        ("import sys\n\nsys.exit(3)\n", 3, "SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(
    tmp_path: Path, source: str, line: int, said: str
) -> None:
    (tmp_path / "theirs.py").write_text(source)

    with pytest.raises(HookError, match=said) as caught:
        load("theirs.py:f", tmp_path)

    assert caught.value.where == f"reward.function ({tmp_path / 'theirs.py'}:{line})"


def test_a_function_that_must_be_async_is_told_so(folder: Path) -> None:
    with pytest.raises(HookError) as caught:
        load("mine.py:good", folder, HookSignature(("sample",), "float", "async"))

    assert caught.value.fix == "write async def"
