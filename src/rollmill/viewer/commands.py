"""The command `rollmill view`, ready to be registered with typer."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN2 …]", help="Run folders.")],
    host: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes any free one.", min=0, max=65535)
    ] = 8265,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in a local web page: metrics, samples, timeline, ledger; live or afterwards."""
    from rollmill.viewer.server import serve

    def ready(address: str) -> None:
        typer.echo(f"showing {len(runs)} run{'' if len(runs) == 1 else 's'} at {address}")
        typer.echo("it reads the runs' files only; stop it with Ctrl-C at any time")
        if browser:
            webbrowser.open(address)

    serve(runs, host=host, port=port, on_ready=ready)
