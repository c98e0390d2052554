"""Process groups between a trainer and engines, beside whatever groups each of them has.

The steps are those that SGLang takes, so either side may be either program. Invariants: joining
and every broadcast end within the group's timeout; rank 0 listens on the address it was given and
nowhere else.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

BACKENDS = ("gloo", "nccl")


def listen(address: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Rank 0's meeting point on a free port of `address`, and that port; waits for nobody."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(128)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> Store:
    """The meeting point of rank 0, from another rank.

    Raises:
        RuntimeError: nobody listens there (torch's own error).
    """
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
    assert isinstance(store, Store)
    return store


def join(
    store: Store,
    name: str,
    *,
    address: str,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
) -> Any:
    """The group, once all `world_size` ranks are there.

    Args:
        store: the meeting point.
        name: the group's name; the same on all ranks, new for every group of a process.
        address: where rank 0 listens; on a loopback address gloo stays on loopback too.
        rank: this process, from 0.
        world_size: how many ranks there are.
        backend: `gloo` or `nccl`.
        timeout_s: how long joining, and later any operation, may take.

    Raises:
        ValueError: the backend is not available.
        RuntimeError: the others did not come (torch's own error).
    """
    if backend not in BACKENDS or not dist.is_backend_available(backend):
        raise ValueError(f"backend must be one of {BACKENDS} and available, got {backend!r}")
    _prepare_backend(backend, address)
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave(group: Any) -> None:
    """Leave a group; whoever waits for this rank in it gets an error."""
    dist.destroy_process_group(group)


def broadcast(tensor: torch.Tensor, group: Any) -> None:
    """From rank 0's `tensor` into the others'.

    Raises:
        RuntimeError: a rank is gone, or did not come in time (torch's own error).
    """
    dist.broadcast(tensor, src=0, group=group)


def _prepare_backend(backend: str, address: str) -> None:
    """What the backends take from the environment only; set by the user, it stays."""
    if backend == "nccl":  # without it a rank that waits too long is killed, not told
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    elif _is_loopback(address):  # otherwise gloo takes the host name's address, if it has one
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
