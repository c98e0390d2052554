"""The address that an engine listens on, taken before anything slow happens.

Light on imports: a taken port is reported before torch is loaded.
"""

from __future__ import annotations

import socket

from rollmill.errors import EngineError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port shows before the model loads.

    Raises:
        EngineError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise port_error(f"{host}:{port}", error) from error
    return listener


def port_error(address: str, error: OSError) -> EngineError:
    """What to tell the user when `address` cannot be listened on."""
    return EngineError(
        f"the engine cannot listen on {address}: {error.strerror}",
        where="engine.port",
        expected="a free port",
        fix="stop what uses the port, choose another one, or let port be null",
    )
