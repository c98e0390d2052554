"""Fixtures of the trainer's tests; their helpers are in `trainer_testkit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., str]:
    def save(model: Any, name: str = "model") -> str:
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save
