"""Several trainer processes as one: who I am, and the few things we tell each other.

Every rank is given the same batch and plans the same step; each scores its share of the samples.
Gradients are added up by FSDP2 (`Policy.shard`), per-token values here: each token is scored by
exactly one rank and is 0 on the others, so the sum is the value itself and every rank computes
the same metrics from the same numbers, bit for bit, as a single rank would from those values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


class Ranks:
    """This process among the trainer's processes; without a rendezvous, the only one.

    Args:
        rank: this process's number, from 0.
        size: how many there are.
        rendezvous: `tcp://host:port` where they meet; needed when `size` is above 1.
        device: where collective operations work: gloo on the CPU, NCCL on a GPU.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        rendezvous: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        if size > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def sum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The element-wise sum over all ranks."""
        if self.size == 1:
            return values
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        dist.all_reduce(tensor)
        return tensor.cpu().numpy()

    def max(self, value: int) -> int:
        """The largest of all ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def spread(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Items by rank, balanced: the costliest first, each to the rank with the least so far.

    No rank has more than the mean plus the costliest item. Items of a rank keep their order.
    """
    loads = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda number: -costs[number]):
        rank = min(range(num_ranks), key=lambda number: loads[number])
        loads[rank] += costs[item]
        shares[rank].append(item)
    return [sorted(share) for share in shares]


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with all its shards; every rank must ask."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def like(values: Tensor, pattern: Tensor) -> Tensor:
    """`values` on the device and sharded as `pattern` is."""
    if isinstance(pattern, DTensor):
        moved = values.to(pattern.device)
        return distribute_tensor(moved, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return values.to(pattern.device)
