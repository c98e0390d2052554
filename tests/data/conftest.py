"""A small character tokenizer and a way to write data files."""

import json
from pathlib import Path

import pytest
from tiny import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def write_jsonl(tmp_path):
    """Write rows (objects, or raw text for bad ones) as JSON lines; gives the path as text."""

    def write(*rows, name="rows.jsonl") -> str:
        path = Path(tmp_path, name)
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write
