"""The engine as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
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
        url = url_of(process)
        with urllib.request.urlopen(f"{url}/model_info", timeout=20) as answer:
            assert json.load(answer)["weight_version"] == "w"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()


def test_a_stopped_engine_answers_what_it_is_writing_and_ends(llama_folder: Path) -> None:
    process = start(str(llama_folder), "--port", "0")
    try:
        url = url_of(process)
        post(url, "/slow_down", {"forward_sleep_time": 0.05})
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
            "stream": True,
        }
        with post_open(url, "/generate", body) as answer:
            answer.readline()  # the first token is there
            process.send_signal(signal.SIGTERM)
            events = [line for line in answer.read().decode().splitlines() if line]
        last = json.loads(events[-2].removeprefix("data: "))["meta_info"]
        assert events[-1] == "data: [DONE]"
        assert last["finish_reason"]["type"] == "abort"
        assert "shutting down" in last["finish_reason"]["message"]
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"ready on (\S+)", line):
            return found[1]
    raise AssertionError("the engine did not start")


def post_open(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, data=json.dumps(body).encode())
    return urllib.request.urlopen(request, timeout=20)


def post(url: str, path: str, body: dict[str, Any]) -> None:
    with post_open(url, path, body) as answer:
        answer.read()


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
