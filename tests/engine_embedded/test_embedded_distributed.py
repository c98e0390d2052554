"""Weights by torch.distributed: a second process is the trainer, rank 0 of a gloo group."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from embedded_helpers import post, refused, serving
from test_embedded_updates import checksum, greedy
from transformers import AutoModelForCausalLM

TRAINER = """
import sys
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from transformers import AutoModelForCausalLM

folder, port = sys.argv[1:]
timeout = timedelta(seconds=60)
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
group, _ = c10d._new_process_group_helper(
    size, rank, [], dist.Backend("gloo"), c10d.PrefixStore("g", store),
    group_name="g", timeout=timeout)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
for name, tensor in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
    dist.broadcast(tensor.data, src=0, group=group)
print("sent", flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_broadcast_weights_come_in_when_the_session_ends(
    llama_folder: Path, other_weights: Path
) -> None:
    async def run() -> None:
        port = free_port()
        trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TRAINER, str(other_weights), str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with serving(other_weights) as client:
                expected = await checksum(client)
            async with serving(llama_folder) as client:
                await update_by_group(client, port, other_weights, expected)
        finally:
            trainer.kill()
            await trainer.wait()

    asyncio.run(run())


async def update_by_group(client: Any, port: int, folder: Path, expected: str) -> None:
    join = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
    }
    assert (await post(client, "/init_weights_update_group", join))["success"]
    assert not (await refused(client, "/init_weights_update_group", join))["success"]
    old = await checksum(client)
    assert await post(client, "/begin_weight_update", {}) == {"success": True, "message": "Success"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = list(model.named_parameters())
    update = {
        "names": [name for name, _ in weights],
        "dtypes": ["float32"] * len(weights),
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "group_name": "g",
        "weight_version": "d1",
    }
    answer = await post(client, "/update_weights_from_distributed", update)
    assert answer["message"].endswith("Weight version updated to d1.")
    assert await checksum(client) == old
    await post(client, "/end_weight_update", {})
    assert await checksum(client) == expected
    assert (await greedy(client))["meta_info"]["weight_version"] == "d1"
    assert (await post(client, "/destroy_weights_update_group", {"group_name": "g"}))["success"]
    await refused(client, "/destroy_weights_update_group", {"group_name": "g"})


def test_updates_need_a_session_and_a_group(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            update = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]}
            answer = await refused(client, "/update_weights_from_distributed", update)
            assert "must run between begin_weight_update()" in answer["message"]
            answer = await refused(client, "/end_weight_update", {})
            assert "no weight-update session is open" in answer["message"]
            await post(client, "/begin_weight_update", {})
            answer = await refused(client, "/begin_weight_update", {})
            assert "already open" in answer["message"]
            answer = await refused(client, "/update_weights_from_distributed", update)
            assert "there is no group" in answer["message"]
            for broken in ({"names": []}, {"dtypes": [5]}, {"shapes": [["x"]]}):
                await refused(client, "/update_weights_from_distributed", update | broken)
            before = await checksum(client)
            answer = await refused(client, "/end_weight_update", {})
            assert "the old weights stay" in answer["message"]
            assert await checksum(client) == before
            await post(client, "/begin_weight_update", {})  # the failed session is over
            await post(client, "/end_weight_update", {"discard": True})
            await refused(client, "/init_weights_update_group", {"master_port": 5})

    asyncio.run(run())
