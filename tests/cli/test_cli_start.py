"""The command line is quick to start and loads nothing heavy for it."""

import subprocess
import sys

import pytest


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import rollmill", "import rollmill.cli"])
def test_importing_loads_neither_torch_nor_transformers(code: str) -> None:
    assert modules_after(code).isdisjoint({"torch", "transformers", "numpy", "pyarrow", "pydantic"})


def test_help_names_every_command_without_loading_torch() -> None:
    script = (
        "import sys\nsys.argv = ['rollmill', '--help']\nfrom rollmill.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = (
        "train",
        "eval",
        "check",
        "grade",
        "config",
        "serve",
        "inspect",
        "view",
        "replay",
        "export",
    )
    assert [c for c in commands if f"  {c} " not in done.stdout] == []


def test_config_prints_every_section() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollmill.cli", "config"], capture_output=True, text=True, check=True
    )
    for section in ("run", "model", "data", "rollout", "reward", "engine", "trainer", "eval"):
        assert f"\n{section}:" in f"\n{done.stdout}"


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m rollmill.cli config | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("run:")
    assert done.stderr == ""
