"""User values inside a sample as msgpack: what JSON can say, plus numpy arrays.

Invariant: what `pack` accepts, `unpack` gives back unchanged (tuples come back as lists): NaN,
integers beyond 64 bits, lone surrogates, numpy arrays and scalars of any numeric type. They
travel as four msgpack extension types, little-endian; nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rollmill.errors import DataError

_EXT_ARRAY = 1
_EXT_SCALAR = 2
_EXT_BIG_INT = 3
_EXT_SURROGATES = 4


def pack(value: Any, *, where: str) -> bytes:
    """`value` as msgpack.

    Raises:
        DataError: `value` holds something that is neither JSON-like nor numpy.
    """
    try:
        return _ENCODER.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return _ENCODER.encode(_escape(value))
    except TypeError as error:
        raise DataError(
            "a value in a sample cannot be written",
            where=where,
            expected="JSON values (objects, lists, text, numbers, booleans, null) or numpy arrays",
            found=str(error),
            fix="keep such objects out of label, metadata, reward and multimodal_inputs",
        ) from error


def unpack(data: bytes) -> Any:
    """What `pack` was given; ValueError or TypeError when `data` is something else."""
    return _DECODER.decode(data)


class _BigInt:
    """An integer beyond 64 bits, on its way to the encoder."""

    def __init__(self, value: int) -> None:
        self.value = value


class _Surrogates:
    """Text with lone surrogates, which UTF-8 forbids, on its way to the encoder."""

    def __init__(self, value: str) -> None:
        self.value = value


def _to_ext(value: Any) -> Any:
    """Called by the encoder for every value that is not plain msgpack."""
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(_EXT_SCALAR, pack_array(np.asarray(value)))
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_EXT_ARRAY, pack_array(value))
    if isinstance(value, _BigInt):
        size = value.value.bit_length() // 8 + 1
        raw = value.value.to_bytes(size, "little", signed=True)
        return msgspec.msgpack.Ext(_EXT_BIG_INT, raw)
    if isinstance(value, _Surrogates):
        raw = value.value.encode("utf-8", "surrogatepass")
        return msgspec.msgpack.Ext(_EXT_SURROGATES, raw)
    raise TypeError(f"{value!r} of type {type(value).__name__}")


def _from_ext(code: int, data: memoryview) -> Any:
    """Called by the decoder for every extension value."""
    if code == _EXT_ARRAY:
        return unpack_array(data)
    if code == _EXT_SCALAR:
        return unpack_array(data)[()]
    if code == _EXT_BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _EXT_SURROGATES:
        return bytes(data).decode("utf-8", "surrogatepass")
    raise ValueError(f"unknown extension type {code}")


def _escape(value: Any) -> Any:
    """`value` with big integers and lone surrogates wrapped: the slow path, rarely taken."""
    if isinstance(value, dict):
        return {_escape(key): _escape(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(entry) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(2**63) <= value < 2**64 else _BigInt(value)
    if isinstance(value, str) and not _is_unicode(value):
        return _Surrogates(value)
    return value


def pack_array(array: np.ndarray[Any, Any]) -> bytes:
    """Any numeric or bool array as bytes: msgpack [dtype, shape], then the raw elements."""
    if array.dtype.hasobject:
        raise TypeError("a numpy array of Python objects")
    header = msgspec.msgpack.encode([array.dtype.str, list(array.shape)])
    return len(header).to_bytes(2, "little") + header + array.tobytes()


def unpack_array(data: bytes | memoryview) -> np.ndarray[Any, Any]:
    """The read-only array that `pack_array` wrote."""
    start = 2 + int.from_bytes(data[:2], "little")
    dtype, shape = msgspec.msgpack.decode(data[2:start])
    return np.frombuffer(bytes(data[start:]), np.dtype(dtype)).reshape(shape)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_ext)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_from_ext)
