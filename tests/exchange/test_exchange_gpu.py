"""Weights from one process's device to another's: gloo between CPUs, NCCL between two GPUs, and
handles of one GPU's memory between two processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmill.exchange import groups
from rollmill.exchange.buckets import flatten, specs_of, unflatten
from rollmill.exchange.handles import LentMemory, borrow, lend_cuda, read_handle

TIMEOUT_S = 60.0
SIZE = 100_003
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def device_of(backend: str, rank: int) -> torch.device:
    return torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    wide = torch.randn(SIZE, generator=random)
    return {"float32": wide, "bfloat16": wide.bfloat16()}


def receive(backend: str, port: int, folder: Path) -> None:
    """Rank 1: what came in is left in a file."""
    device = device_of(backend, 1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = groups.connect("127.0.0.1", port, 1, 2, TIMEOUT_S)
    group = join(store, backend, 1)
    found = {name: torch.empty_like(tensor, device=device) for name, tensor in weights().items()}
    for tensor in found.values():
        groups.broadcast(tensor, group)
    save_file({name: tensor.cpu() for name, tensor in found.items()}, folder / "found.safetensors")
    groups.leave(group)


def join(store: Any, backend: str, rank: int) -> Any:
    return groups.join(
        store,
        "weights",
        address="127.0.0.1",
        rank=rank,
        world_size=2,
        backend=backend,
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=NEEDS_TWO_GPUS)])
def test_every_bit_arrives(backend: str, tmp_path: Path) -> None:
    store, port = groups.listen("127.0.0.1", TIMEOUT_S)
    receiver = multiprocessing.get_context("spawn").Process(
        target=receive, args=(backend, port, tmp_path)
    )
    receiver.start()
    try:
        group = join(store, backend, 0)
        for tensor in weights().values():
            groups.broadcast(tensor.to(device_of(backend, 0)), group)
        receiver.join(TIMEOUT_S)
        assert receiver.exitcode == 0
        groups.leave(group)
    finally:
        receiver.kill()
    found = load_file(tmp_path / "found.safetensors")
    for name, tensor in weights().items():
        assert torch.equal(found[name], tensor), name


def copy_lent(handle: dict[str, Any], folder: Path) -> None:
    """A borrower: what it finds behind the handle is left in a file."""
    bucket = specs_of({"float32": weights()["float32"]})
    found = unflatten(bucket, borrow(read_handle(handle)))
    save_file({name: tensor.cpu().clone() for name, tensor in found.items()}, folder / "lent")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_lent_memory_is_read_by_another_process(device: str, tmp_path: Path) -> None:
    tensors = {"float32": weights()["float32"]}
    bucket = specs_of(tensors)
    flat = flatten(bucket, tensors)
    memory = LentMemory(flat.numel())
    if device == "cuda":
        flat = flat.to(device)
        handle = msgspec.to_builtins(lend_cuda(flat))
    else:
        memory.tensor.copy_(flat)
        handle = msgspec.to_builtins(memory.handle(flat.numel()))
    borrower = multiprocessing.get_context("spawn").Process(
        target=copy_lent, args=(handle, tmp_path)
    )
    borrower.start()
    try:
        borrower.join(TIMEOUT_S)
        assert borrower.exitcode == 0
    finally:
        borrower.kill()
        memory.close()
    assert torch.equal(load_file(tmp_path / "lent")["float32"], tensors["float32"])
