"""A made-up run, a hostile one, a viewer that serves them and a browser that looks."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmill.viewer.server import running
from support.hostile_run import make_hostile_run
from support.made_run import Shape, make_run

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,1000",
)


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps of 8 groups of 4 answers."""
    return make_run(tmp_path_factory.mktemp("runs") / "made", Shape())


@pytest.fixture(scope="session")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller run of another seed."""
    return make_run(tmp_path_factory.mktemp("runs") / "other", Shape(num_steps=6, seed=5))


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text tries to be more than text."""
    return make_hostile_run(tmp_path_factory.mktemp("runs") / "hostile")


@contextmanager
def serving(*folders: Path) -> Iterator[str]:
    """The viewer in a thread; gives its address."""
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def serve() -> None:
        state["loop"], state["stop"] = asyncio.get_running_loop(), asyncio.Event()
        async with running(list(folders), "127.0.0.1", 0) as address:
            state["address"] = address
            ready.set()
            await state["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield state["address"]
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(30)


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`with serve(folder, …) as address`."""
    return serving


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """A headless Chromium with a profile of its own; skipped where there is none, except in CI."""
    if not (Path(CHROMIUM).exists() and Path(DRIVER).exists()) and "CI" not in os.environ:
        pytest.skip("chromium and chromium-driver are not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    profile = tempfile.mkdtemp(prefix="rollmill-chromium-")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    browser.set_page_load_timeout(60)
    browser.set_script_timeout(60)
    try:
        yield browser
    finally:
        browser.quit()
        shutil.rmtree(profile, ignore_errors=True)
