"""The frames between a driver and its worker processes: msgpack, length-prefixed, no pickle.

A frame is a little-endian uint64 length and that many bytes of msgpack. Values are plain:
None, bool, int, float, str, bytes, lists and dicts.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from rollmill import errors

LENGTH = struct.Struct("<Q")


class Call(msgspec.Struct, array_like=True):
    """Ask a worker to run one of its object's methods."""

    call_id: int
    method: str
    arguments: dict[str, Any]


class Reply(msgspec.Struct, array_like=True):
    """The value of a call, or the error it ended with."""

    call_id: int
    value: Any
    error: WireError | None


class WireError(msgspec.Struct, array_like=True):
    """An exception, taken apart so that the other side can raise its like."""

    kind: str
    what: str
    parts: dict[str, str]
    trace: str


def pack(message: Call | Reply) -> bytes:
    """One frame, ready to be written."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_exactly(connection: socket.socket, count: int) -> bytes | None:
    """`count` bytes, or None when the other side closed before."""
    chunks = bytearray()
    while len(chunks) < count:
        chunk = connection.recv(min(count - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


def to_wire(error: BaseException, trace: str) -> WireError:
    """Take an exception apart."""
    if isinstance(error, errors.RollmillError):
        return WireError(type(error).__name__, error.what, dict(error.parts()), trace)
    return WireError("", f"{type(error).__name__}: {error}", {}, trace)


def from_wire(error: WireError, *, worker: str, log: str) -> errors.RollmillError:
    """The exception to raise on the caller's side: the same kind when it is one of ours."""
    kind = getattr(errors, error.kind, None) if error.kind else None
    if isinstance(kind, type) and issubclass(kind, errors.RollmillError):
        return kind(error.what, **error.parts)
    return errors.WorkerError(
        f"the {worker} raised {error.what}",
        where=f"{log} has the whole traceback",
        found=error.trace,
    )
