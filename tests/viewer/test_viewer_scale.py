"""A run of 2,000 steps of 512 samples opens as fast as a small one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "viewer.py"
    spec = importlib.util.spec_from_file_location("bench_viewer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_large_run_opens_at_once(bench: ModuleType, tmp_path: Path) -> None:
    root = bench.make_big_run(tmp_path / "run", 2000, 512, 64)
    figures = bench.measure(root, 2000, 512)
    assert figures["first page"] < 1000, figures
    assert figures["list of a step, median"] + figures["sample, median"] < 300, figures
