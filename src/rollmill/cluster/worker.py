"""The inside of a worker process: `python -m rollmill.cluster.worker FD module:Class`.

Builds one object from the arguments of the first call and then runs the calls that arrive, one
after the other. A second thread watches the connection: when the driver is gone (even by
`kill -9`) the process exits at once, whatever it is doing, so no worker outlives its run.

Signals that ask to end are the driver's to obey: job schedulers send them to every process of a
job, and the driver then needs its workers to finish the step and save.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback

import msgspec

from rollmill.cluster.frames import LENGTH, Call, Reply, pack, read_exactly, to_wire

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Serve calls from the inherited socket until the driver closes it."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _pass)
    connection = socket.socket(fileno=int(arguments[0]))
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(connection, calls), daemon=True).start()
    _serve(connection, calls, target=arguments[1])


def _pass(*_: object) -> None:
    """A signal that is not for us (SIG_IGN would be handed on to programs that are started)."""


def _watch(connection: socket.socket, calls: queue.SimpleQueue[Call]) -> None:
    """Take in calls until the driver is gone, however it went; then end the process.

    A driver that is killed with replies it did not read shows as a reset connection, not as a
    closed one: nothing that ends this loop may leave the process running.
    """
    decode = msgspec.msgpack.Decoder(Call).decode
    status = 0
    try:
        while (header := read_exactly(connection, LENGTH.size)) is not None:
            body = read_exactly(connection, LENGTH.unpack(header)[0])
            if body is None:
                break
            calls.put(decode(body))
    except ConnectionError:
        pass
    except Exception:
        # Policy: no call after an unreadable one can be trusted, so the process ends, as failed.
        logger.exception("the driver's calls cannot be read any more")
        status = 1
    finally:
        os._exit(status)


def _serve(connection: socket.socket, calls: queue.SimpleQueue[Call], target: str) -> None:
    instance: object = None
    while True:
        call = calls.get()
        try:
            if call.method == "__init__":
                module, _, name = target.partition(":")
                instance = getattr(importlib.import_module(module), name)(**call.arguments)
                value = os.getpid()
            else:
                value = getattr(instance, call.method)(**call.arguments)
            frame = pack(Reply(call.call_id, value, None))
        except Exception as error:  # noqa: BLE001 - policy: every error belongs to the caller
            trace = traceback.format_exc()
            logger.error("%s failed:\n%s", call.method, trace)
            frame = pack(Reply(call.call_id, None, to_wire(error, trace)))
        connection.sendall(frame)


if __name__ == "__main__":
    main(sys.argv[1:])
