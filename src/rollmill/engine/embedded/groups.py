"""Weights that arrive through torch.distributed: process groups and update sessions.

The trainer is rank 0 of a group and broadcasts one tensor after the other. What arrives is kept
aside until the session ends and is then copied in at once, so a session that fails half-way
leaves the old weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from rollmill.engine.embedded.sampling import RequestError

BACKENDS = ("gloo", "nccl")
_TIMEOUT = timedelta(minutes=5)


@dataclass(slots=True)
class UpdateSession:
    """What one begin/end bracket has brought so far."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    version: str | None = None


@dataclass(slots=True)
class UpdateGroups:
    """The process groups that this engine has joined, by name."""

    device: torch.device
    _groups: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def join(
        self, name: str, *, address: str, port: int, rank: int, world_size: int, backend: str
    ) -> None:
        """Join a group whose rank 0 listens on `address:port`; blocks until all are there.

        A group of its own beside whatever default group a process has: the same steps as
        SGLang takes, so either side may be either program.

        Raises:
            RequestError: the name is in use, or the backend is not available.
            RuntimeError: the others did not come (torch's own error).
        """
        if name in self._groups:
            raise RequestError(f"the group {name!r} exists already")
        if backend not in BACKENDS or not dist.is_backend_available(backend):
            raise RequestError(f"backend must be one of {BACKENDS} and available, got {backend!r}")
        url = f"tcp://{address}:{port}"
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=_TIMEOUT))
        store.set_timeout(_TIMEOUT)
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            PrefixStore(name, store),
            group_name=distributed_c10d.GroupName(name),
            timeout=_TIMEOUT,
        )
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            RequestError: there is no such group.
        """
        group = self._groups.pop(name, None)
        if group is None:
            raise RequestError(f"there is no group {name!r}")
        dist.destroy_process_group(group)

    def receive(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[list[int]]
    ) -> dict[str, torch.Tensor]:
        """One broadcast per tensor, in order.

        Raises:
            RequestError: no such group, or an impossible dtype or shape.
            RuntimeError: the broadcast failed (torch's own error).
        """
        group = self._groups.get(name)
        if group is None:
            raise RequestError(f"there is no group {name!r}; call init_weights_update_group first")
        is_nccl = dist.get_backend(group) == "nccl"
        device = self.device if is_nccl else torch.device("cpu")
        received = {}
        for one, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(_check_shape(shape), dtype=_dtype(dtype), device=device)
            dist.broadcast(tensor, src=0, group=group)
            received[one] = tensor
        return received


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"unknown dtype {name!r}")
    return dtype


def _check_shape(shape: list[int]) -> list[int]:
    if math.prod(shape) > 2**40 or any(size < 0 for size in shape):
        raise RequestError(f"impossible shape {shape[:8]}")
    return shape
