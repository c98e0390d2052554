"""Reward functions of a user, for the tests: good ones, slow ones and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from typing import Any


def length(sample: Any) -> float:
    return float(len(sample.response))


def parts(sample: Any) -> dict[str, float]:
    return {"score": 1.0, "style": 0.5}


def nothing(sample: Any) -> None:
    return None


def not_a_number(sample: Any) -> Any:
    return {"not a number": float("nan"), "text": "1.0"}[sample.response]


def raises(sample: Any) -> float:
    raise ValueError("no reward today")


def hangs(sample: Any) -> float:
    while sample.response == "hang":
        pass
    return 1.0


def sleeps(sample: Any) -> float:
    while sample.response == "hang":
        time.sleep(60)
    return 1.0


def dies(sample: Any) -> float:
    if sample.response == "die":
        os._exit(3)
    return 1.0


def eats_memory(sample: Any) -> float:
    return float(len(bytearray(1 << 40)))


def describes(sample: Any) -> dict[str, float]:
    assert sample.prompt == "2+3?"
    assert sample.metadata == {"level": 1}
    assert sample.status == "truncated"
    return {"label": float(sample.label), "length": float(sample.response_length)}


def big_label(sample: Any) -> float:
    return float(sample.label == 10**40)


def label_as_number(sample: Any) -> float:
    return float(sample.label)


def process_id(sample: Any) -> float:
    return float(os.getpid())


_begun: list[Any] = []
_all_begun = asyncio.Event()


async def meets(sample: Any) -> float:
    """Returns once 40 calls have begun."""
    _begun.append(sample)
    if len(_begun) == 40:
        _all_begun.set()
    await _all_begun.wait()
    return 1.0


async def waits_on(sample: Any) -> float:
    """Does not let itself be cancelled, as a bare `except:` around waiting does."""
    while sample.response == "hang":
        with contextlib.suppress(BaseException):
            await asyncio.sleep(1000)
    return 1.0


async def cancels_itself(sample: Any) -> float:
    if sample.response == "bad":
        raise asyncio.CancelledError
    return 1.0


def exits(sample: Any) -> float:
    return sys.exit(0) if sample.response == "bad" else 1.0


async def exits_in_a_coroutine(sample: Any) -> float:
    return sys.exit(0) if sample.response == "bad" else 1.0


def names_a_part_that_cannot_be_sent(sample: Any) -> dict[str, float]:
    return {"\ud800" if sample.response == "bad" else "part": 1.0, "score": 1.0}


def closes_its_files(sample: Any) -> float:
    if sample.response == "bad":
        os.closerange(3, 256)
    return 1.0


def dies_and_leaves_a_child(sample: Any) -> float:
    if sample.response == "bad":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
        os._exit(3)
    return 1.0


def leaves_a_file(sample: Any) -> float:
    tempfile.mkstemp()
    if sample.response == "die":
        os._exit(3)
    return float(len(os.listdir(tempfile.gettempdir())))


def forks(sample: Any) -> float:
    if sample.response == "fork":
        os.fork()
    return 1.0


def forks_and_exits(sample: Any) -> float:
    if sample.response == "fork" and os.fork() == 0:
        sys.exit(0)
    return 1.0


async def many_parts(sample: Any) -> dict[str, float]:
    return dict.fromkeys(map(str, range(10_000)), 1.0)


_kept: list[bytes] = []


async def keeps_memory(sample: Any) -> float:
    _kept.append(b"x" * (2 << 20))
    await asyncio.sleep(0.01)
    return float(os.getpid())


def keeps_much_memory(sample: Any) -> float:
    _kept.append(b"x" * (20 << 20))
    return float(os.getpid())


def needs_too_much_memory(sample: Any) -> float:
    if sample.response == "explode":
        _kept.append(b"x" * (1 << 30))
    return 1.0


async def blocks_the_loop(sample: Any) -> float:
    while sample.response == "hang":
        pass
    await asyncio.sleep(0.01)
    return 1.0


async def waits_forever(sample: Any) -> float:
    await asyncio.sleep(0.01 if sample.response != "hang" else 1000)
    return 1.0


def ranks(samples: list[Any]) -> list[float]:
    """Per group: the longest answer wins."""
    longest = max(len(sample.response) for sample in samples)
    return [float(len(sample.response) == longest) for sample in samples]


def in_no_order(samples: list[Any]) -> set[float]:
    return {float(len(sample.response)) for sample in samples}


def wrong_length(samples: list[Any]) -> list[float]:
    return [1.0]


def two_parameters(response: str, label: str) -> float:
    return 0.0
