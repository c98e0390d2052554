"""Weights by handle: another process of this machine lends its memory to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from embedded_helpers import post, refused, serving
from test_embedded_updates import checksum, greedy
from transformers import AutoModelForCausalLM

from rollmill.exchange.buckets import flatten, specs_of
from rollmill.exchange.checksum import checksums_of
from rollmill.exchange.handles import LentMemory

PATH = "/update_weights_from_tensor"


@pytest.fixture
def lent(other_weights: Path) -> Iterator[dict[str, Any]]:
    """A request that hands over all weights of another model, which are lent meanwhile."""
    model = AutoModelForCausalLM.from_pretrained(other_weights, dtype=torch.float32)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    specs = specs_of(weights)
    num_bytes = sum(spec.num_bytes for spec in specs)
    memory = LentMemory(num_bytes)
    flatten(specs, weights, out=memory.tensor)
    yield {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "handle": msgspec.to_builtins(memory.handle(num_bytes)),
        "checksums": list(checksums_of(weights).values()),
        "weight_version": "7",
    }
    memory.close()


def test_lent_weights_come_in_when_the_session_ends(
    llama_folder: Path, other_weights: Path, lent: dict[str, Any]
) -> None:
    async def run() -> None:
        async with serving(other_weights) as client:
            expected, answer = await checksum(client), await greedy(client)
        async with serving(llama_folder) as client:
            old = await checksum(client)
            await post(client, "/begin_weight_update", {})
            reply = await post(client, PATH, lent)
            assert reply["message"].endswith("Weight version updated to 7.")
            assert await checksum(client) == old
            await post(client, "/end_weight_update", {})
            assert await checksum(client) == expected
            found = await greedy(client)
            assert found["meta_info"]["weight_version"] == "7"
            assert (
                found["meta_info"]["output_token_logprobs"]
                == answer["meta_info"]["output_token_logprobs"]
            )

    asyncio.run(run())


def test_the_engine_keeps_copies_and_no_memory_of_the_lender(
    llama_folder: Path, lent: dict[str, Any]
) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/begin_weight_update", {})
            await post(client, PATH, lent)
            await post(client, "/end_weight_update", {})
            maps = Path("/proc/self/maps").read_text()
            assert maps.count("memfd:rollmill-weights") == 1  # the lender's own

    asyncio.run(run())


def changed(lent: dict[str, Any], **handle: Any) -> dict[str, Any]:
    return lent | {"handle": lent["handle"] | handle}


def test_what_does_not_fit_is_refused_and_the_old_weights_stay(
    llama_folder: Path, lent: dict[str, Any]
) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            old = await checksum(client)
            answer = await refused(client, PATH, lent)
            assert "must run between begin_weight_update()" in answer["message"]
            cases = {
                "has the checksum": lent | {"checksums": ["0"] * len(lent["names"])},
                "not on one machine": changed(lent, machine="elsewhere"),
                "is not lent memory": changed(lent, fd=0),
                "not lent any more": changed(lent, fd=999_999),
                "not what its weights need": changed(lent, num_bytes=8),
                "has no weight 'nobody'": lent | {"names": ["nobody", *lent["names"][1:]]},
            }
            for message, body in cases.items():
                await post(client, "/begin_weight_update", {})
                assert message in str(await refused(client, PATH, body)), message
                answer = await refused(client, "/end_weight_update", {})
                assert "the old weights stay" in answer["message"]
            assert await checksum(client) == old

    asyncio.run(run())


def test_pickles_and_nonsense_are_refused_with_a_reason(
    llama_folder: Path, lent: dict[str, Any]
) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/begin_weight_update", {})
            body = {"serialized_named_tensors": ["gASVAAAA"]}
            assert "reads no pickles" in str(await refused(client, PATH, body))
            for handle in ({}, {"kind": "file"}, {"kind": "memory", "fd": "x"}):
                assert "handle" in str(await refused(client, PATH, lent | {"handle": handle}))
            assert "checksums" in str(await refused(client, PATH, lent | {"checksums": ["0"]}))
            await post(client, "/end_weight_update", {"discard": True})

    asyncio.run(run())
