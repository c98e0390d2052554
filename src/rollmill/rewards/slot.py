"""One worker process and the connection to it, kept alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from typing import Protocol

import msgspec

from rollmill import errors
from rollmill.errors import RewardError, RollmillError
from rollmill.rewards.protocol import (
    FrameBuffer,
    Ready,
    Results,
    Setup,
    SetupFailed,
    decode_from_worker,
    encode,
    framed,
)

logger = logging.getLogger(__name__)

START_LIMIT_S = 180.0
STOP_LIMIT_S = 5.0
MAX_FAILED_STARTS = 3
READ_BYTES = 1 << 18

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"), "1"
)


class SlotOwner(Protocol):
    """What a slot tells its pool."""

    def on_results(self, slot: Slot, message: Results) -> None: ...  # noqa: D102
    def on_lost(self, slot: Slot) -> None: ...  # noqa: D102
    def on_restarted(self) -> None: ...  # noqa: D102
    def fail_all(self, error: RewardError) -> None: ...  # noqa: D102


class Slot:
    """A worker process that is started, listened to and replaced when it dies.

    Attributes:
        outstanding: numbers of the tasks that the worker holds.
        is_ready: whether tasks may be sent.
    """

    def __init__(self, number: int, setup: Setup, owner: SlotOwner) -> None:
        self.outstanding: set[int] = set()
        self.is_ready = False
        self._number = number
        self._setup = setup
        self._owner = owner
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def process_id(self) -> int | None:
        """Id of the worker process while it runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> tuple[str, ...]:
        """Start the worker; the names of its graders that are coroutine functions.

        Raises:
            RollmillError: a grader cannot be loaded, or the process cannot be started.
        """
        ready = await self._connect()
        self._listener = asyncio.create_task(self._listen())
        return ready.concurrent

    def send(self, payload: bytes) -> None:
        """Send one frame."""
        self._writer.write(framed(payload))

    async def close(self) -> None:
        """Stop the worker and wait for its end."""
        self.is_ready = False
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
        await self._stop()

    async def _connect(self) -> Ready:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "rollmill.rewards.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise RewardError(f"a reward worker could not be started: {error}") from error
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._frames = FrameBuffer()
        self.send(encode(self._setup))
        return await self._handshake()

    async def _handshake(self) -> Ready:
        message = None
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(START_LIMIT_S):
                while message is None and (data := await self._reader.read(READ_BYTES)):
                    for frame in self._frames.feed(data):
                        message = decode_from_worker(frame)
        if isinstance(message, Ready):
            self.is_ready = True
            return message
        await self._stop()
        if isinstance(message, SetupFailed):
            raise _rebuilt(message)
        raise RewardError(
            "a reward worker did not start",
            expected=f"a worker that loads its graders within {START_LIMIT_S:.0f} s",
            found="it ended or stayed silent",
            fix="see its messages above on stderr; reward.worker_memory_mb may be too small",
        )

    async def _listen(self) -> None:
        while True:
            await self._read_until_lost()
            self.is_ready = False
            self._owner.on_lost(self)
            logger.warning("reward worker %d died; starting another", self._number)
            await self._stop()
            try:
                await self._restart()
            except RollmillError as error:
                self._owner.fail_all(RewardError(str(error)))
                return
            self._owner.on_restarted()

    async def _restart(self) -> None:
        for attempt in range(MAX_FAILED_STARTS):
            try:
                await self._connect()
            except RollmillError:
                if attempt + 1 == MAX_FAILED_STARTS:
                    raise
            else:
                return

    async def _read_until_lost(self) -> None:
        # What cannot be read is as good as lost: the worker is replaced.
        with contextlib.suppress(ConnectionError, ValueError, msgspec.DecodeError):
            while data := await self._reader.read(READ_BYTES):
                for frame in self._frames.feed(data):
                    message = decode_from_worker(frame)
                    if isinstance(message, Results):
                        self._owner.on_results(self, message)

    async def _stop(self) -> None:
        """Close the connection, which ends the worker; kill it when it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        self._writer.close()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        except BaseException:
            process.kill()
            raise


def _rebuilt(message: SetupFailed) -> RollmillError:
    kind = getattr(errors, message.kind, RewardError)
    return kind(message.what, **message.parts)
