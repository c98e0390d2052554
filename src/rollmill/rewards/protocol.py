"""What the run and its grading processes say to each other.

Frames are a 4-byte little-endian length and a msgpack message, over socket pairs. Nothing is
pickled: a grading process that was taken over by a hostile answer can send nothing but data.

The life of a connection: the run sends one `Setup`, the worker answers `Ready` or `SetupFailed`,
then the run sends `Batch`es of tasks and the worker sends `Results`, in any order, one per task.
Between the worker and the processes that it forks it is the same, with `Begin` for `Setup`.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.outcome import Outcome

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
_BIG_INT = 1


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """How to grade: sent once."""

    config: str
    base_dir: str
    seed: int
    graders: tuple[str, ...]


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """To a forked process, which has the set-up from the fork: load the graders and grade."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """All graders of the set-up are loaded; which of them are coroutine functions."""

    concurrent: tuple[str, ...]


class SetupFailed(msgspec.Struct, tag="setup_failed", frozen=True):
    """A grader could not be loaded: the parts of the error for the user."""

    kind: str
    what: str
    parts: dict[str, str]


class Task(msgspec.Struct, frozen=True):
    """One answer for one grader, or (`grouped`) all answers to a prompt in one call."""

    grader: str
    inputs: list[RewardInput]
    grouped: bool = False


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A task as the middle process sees it: number, answers in it, and the encoded `Task`."""

    number: int
    num_answers: int
    body: msgspec.Raw


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """Tasks to grade; `alone` asks for one at a time even when they could overlap."""

    tasks: list[Envelope]
    alone: bool = False


class Result(msgspec.Struct, array_like=True, frozen=True):
    """The outcomes of one task, one per answer in it."""

    number: int
    outcomes: list[Outcome]


class Results(msgspec.Struct, tag="results", frozen=True):
    """Finished tasks, and graders that were found to be coroutine functions on the way."""

    results: list[Result]
    concurrent: tuple[str, ...] = ()


ToWorker = Setup | Begin | Batch
FromWorker = Ready | SetupFailed | Results

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """A message of ours as msgpack."""
    return _encoder.encode(message)


def encode_task(task: Task) -> bytes:
    """A task, whatever Python values its label and metadata hold."""
    try:
        if all(isinstance(key, str) for item in task.inputs for key in item.metadata):
            return _encoder.encode(task)
    except (OverflowError, TypeError, UnicodeEncodeError, ValueError, RecursionError):
        pass
    inputs = [
        RewardInput(
            prompt=plain(item.prompt),
            response=plain(item.response),
            label=plain(item.label),
            metadata={str(key): plain(value) for key, value in item.metadata.items()},
            status=item.status,
            response_length=item.response_length,
            index=item.index,
        )
        for item in task.inputs
    ]
    return _encoder.encode(Task(task.grader, inputs, task.grouped))


def plain(value: Any, depth: int = 0, *, big_ints_as_text: bool = False) -> Any:
    """`value` made of what msgpack can hold.

    Integers beyond 64 bits become an extension that `decode_task` turns back; numpy numbers and
    arrays become numbers and lists; lone surrogates become `?`; anything else its `repr`.
    """

    def inside(part: Any) -> Any:
        return plain(part, depth + 1, big_ints_as_text=big_ints_as_text)

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)  # numpy's is one too, but not to the encoder
    if depth > 100:
        return "…"
    if isinstance(value, int):
        if -(2**63) <= value < 2**64:
            return int(value)
        digits = _digits(value)
        return digits if big_ints_as_text else msgspec.msgpack.Ext(_BIG_INT, digits.encode())
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {str(plain(str(k))): inside(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [inside(item) for item in value]
    if hasattr(value, "tolist"):
        return inside(value.tolist())
    return repr(value)


def _digits(value: int) -> str:
    """Decimal digits (hexadecimal where Python refuses to write them all)."""
    try:
        return str(value)
    except ValueError:
        return hex(value)


def _ext_hook(code: int, data: memoryview) -> Any:
    if code != _BIG_INT:
        raise ValueError(f"unknown extension {code}")
    return int(bytes(data).decode(), 0)


_task_decoder = msgspec.msgpack.Decoder(Task, ext_hook=_ext_hook)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def decode_task(body: msgspec.Raw) -> Task:
    """The task in an envelope."""
    return _task_decoder.decode(body)


def decode_to_worker(frame: bytes) -> Setup | Begin | Batch:
    """A message of the run, or of the process above."""
    return _to_worker.decode(frame)


def decode_from_worker(frame: bytes) -> Ready | SetupFailed | Results:
    """A message of a worker."""
    return _from_worker.decode(frame)


def framed(payload: bytes) -> bytes:
    """A payload with its header."""
    return HEADER.pack(len(payload)) + payload


class FrameBuffer:
    """Bytes in, whole frames out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes.

        Raises:
            ValueError: a header announces more than `MAX_FRAME_BYTES`.
        """
        self._bytes += data
        frames: list[bytes] = []
        start = 0
        while len(self._bytes) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes")
            end = start + HEADER.size + length
            if len(self._bytes) < end:
                break
            frames.append(bytes(self._bytes[start + HEADER.size : end]))
            start = end
        del self._bytes[:start]
        return frames
