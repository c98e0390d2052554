"""How a command runs as a process: signals, logging, garbage collection, and errors as text."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import typer

from rollmill.errors import RollmillError
from rollmill.event_loop import new_event_loop

SAME_REQUEST_S = 0.5
"""A signal so soon after the first is the same request: `timeout` and shells send theirs to the
process and to its group."""


def run_until_signal(work: Coroutine[Any, Any, Any], stop: asyncio.Event | None = None) -> Any:
    """Run to the end. The first SIGINT or SIGTERM asks to stop, a later one cancels.

    A terminal that goes away (SIGHUP) asks to stop and never cancels; what would be shown on it is
    lost. Under `nohup` it does nothing.
    """
    terminals = [number for number in (1, 2) if os.isatty(number)]

    async def with_signals() -> Any:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        asked_at = 0.0

        def ask() -> None:
            nonlocal asked_at
            if stop is None:
                task.cancel()
            elif not stop.is_set():
                stop.set()
                asked_at = loop.time()
                text = "\nstopping after this step (once more: stop now, without saving)"
                typer.echo(text, err=True)

        def on_signal() -> None:
            if stop is not None and stop.is_set():
                if loop.time() - asked_at > SAME_REQUEST_S:
                    task.cancel()
            else:
                ask()

        def on_hangup() -> None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            for number in terminals:
                os.dup2(nothing, number)
            os.close(nothing)
            ask()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, on_hangup)
        return await task

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(with_signals())
    except asyncio.CancelledError:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None


def quiet_libraries() -> None:
    """No network, no progress bars, no advice from libraries in the terminal."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def collect_garbage_seldom() -> None:
    """Thousands of requests in flight make many objects and few cycles.

    With Python's own thresholds a full collection held the event loop of 4,096 requests in flight
    for up to 0.7 s. With these a small one takes less than 10 ms, and a batch of rollouts puts the
    others off.
    """
    gc.freeze()
    gc.set_threshold(20_000, 250, 1000)


def log_to(path: Path) -> None:
    """Everything to the run's log; warnings to the terminal too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)


_SYSTEM_FIXES = {
    errno.ENOSPC: "free some, or write to another disk",
    errno.EDQUOT: "free some, or write to another disk",
    errno.EACCES: "choose a folder that you may write to, or change its permissions",
    errno.EPERM: "choose a folder that you may write to, or change its permissions",
    errno.EROFS: "choose a folder on a disk that can be written to",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another path",
    errno.ENOENT: "choose a path below a folder that exists",
    errno.EISDIR: "a folder stands where a file is needed: choose another path",
}


def from_system(error: OSError) -> RollmillError | None:
    """A refusal of the operating system about a file, as an error for the user.

    None for all others, which a user could do nothing about: they keep their traceback.
    """
    number = error.errno
    if number not in _SYSTEM_FIXES or (error.filename is None and number != errno.ENOSPC):
        return None
    return RollmillError(
        f"the system refuses a file or folder: {error.strerror}",
        where=str(error.filename or "the disk that is written to"),
        fix=_SYSTEM_FIXES[number],
    )


def fail(error: RollmillError) -> NoReturn:
    """Show the error, part by part, and end with status 2."""
    style = sys.stderr.isatty()
    bold, plain = ("\033[1;31m", "\033[0m") if style else ("", "")
    typer.echo(f"{bold}error:{plain} {error.what}", err=True)
    for label, text in error.parts():
        typer.echo(f"  {label + ':':<10}{text}", err=True)
    raise SystemExit(2)
