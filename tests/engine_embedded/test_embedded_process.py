"""The engine as a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollmill.engine.embedded", *arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        **options,
    )


def test_it_serves_and_ends_with_its_parents_pipe(llama_folder: Path) -> None:
    process = start(str(llama_folder), "--port", "0", "--exit-with-stdin", "--weight-version", "w")
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if found := re.search(r"ready on (\S+)", line):
                url = found[1]
                break
        with urllib.request.urlopen(f"{url}/model_info", timeout=20) as answer:
            assert json.load(answer)["weight_version"] == "w"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()


def test_a_taken_port_is_a_clear_error(llama_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(str(llama_folder), "--port", str(port))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"127.0.0.1:{port}" in errors
    assert "Traceback" not in errors


def test_bad_settings_are_a_clear_error(llama_folder: Path) -> None:
    process = start(str(llama_folder), "--config-json", '{"num_treads": 1}')
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "num_treads" in errors
    assert "Traceback" not in errors
