"""Serving the page: `serve(runs, host, port)`, on this machine only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from rollmill.viewer.api import routes
from rollmill.viewer.errors import ViewerError
from rollmill.viewer.runs import open_runs
from rollmill.viewer.security import is_loopback, only_this_machine

STATIC = Path(str(files("rollmill.viewer") / "static"))


def make_app(folders: list[Path]) -> web.Application:
    """The application for the runs in `folders`.

    Raises:
        ViewerError: a folder is no run.
    """
    app = web.Application(middlewares=[only_this_machine])
    app.add_routes(routes(open_runs(folders)))
    app.router.add_get("/", _page)
    app.router.add_static("/static/", STATIC)
    return app


@asynccontextmanager
async def running(folders: list[Path], host: str, port: int) -> AsyncIterator[str]:
    """The viewer, answering while the block runs; gives its address.

    Args:
        folders: the runs.
        host: a loopback address.
        port: where to listen; 0 takes any free one.

    Raises:
        ViewerError: a folder is no run, the host is not this machine's, or the port is taken.
    """
    if not is_loopback(host):
        raise ViewerError(
            "the viewer serves this machine only",
            where="--host",
            expected="127.0.0.1, ::1 or localhost",
            found=host,
            fix="from another machine, open a tunnel: ssh -L 8265:127.0.0.1:8265 THIS_MACHINE",
        )
    runner = web.AppRunner(make_app(folders), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ViewerError(
                "the viewer cannot listen there",
                where=f"{host}:{port}",
                found=error.strerror or str(error),
                fix="choose another --port (0 takes any free one)",
            ) from None
        bound = runner.addresses[0][1]
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound}/"
    finally:
        await runner.cleanup()


def serve(
    runs: list[Path],
    host: str = "127.0.0.1",
    port: int = 8265,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        runs: run folders; the first is shown first.
        host: a loopback address.
        port: where to listen; 0 takes any free one.
        on_ready: called with the page's address once it answers.

    Raises:
        ViewerError: see `running`.
    """

    async def until_stopped() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with running(runs, host, port) as address:
            if on_ready is not None:
                on_ready(address)
            await stop.wait()

    asyncio.run(until_stopped())


async def _page(_: web.Request) -> web.FileResponse:
    return web.FileResponse(STATIC / "index.html")
