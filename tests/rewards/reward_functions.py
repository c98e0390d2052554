"""Reward functions of a user, for the tests: good ones, slow ones and hostile ones."""

from __future__ import annotations

import asyncio
import os
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


def process_id(sample: Any) -> float:
    return float(os.getpid())


async def waits(sample: Any) -> float:
    await asyncio.sleep(0.2)
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


def wrong_length(samples: list[Any]) -> list[float]:
    return [1.0]


def two_parameters(response: str, label: str) -> float:
    return 0.0
