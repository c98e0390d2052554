"""Weights that arrive through torch.distributed: process groups and update sessions.

The trainer is rank 0 of a group and broadcasts one tensor or bucket after the other. What arrives
is kept aside until the session ends and is then copied in at once, so a session that fails half-way
leaves the old weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rollmill.engine.embedded.sampling import RequestError
from rollmill.exchange import groups
from rollmill.exchange.buckets import dtype_of, unflatten
from rollmill.exchange.specs import WeightSpec

TIMEOUT_S = 300.0
MAX_BYTES = 2**43


@dataclass(slots=True)
class UpdateSession:
    """What one begin/end bracket has brought so far."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    version: str | None = None
    failure: str | None = None
    """Why an update of the session failed: then none of it is used."""


@dataclass(slots=True)
class UpdateGroups:
    """The process groups that this engine has joined, by name."""

    device: torch.device
    _groups: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def join(
        self,
        name: str,
        *,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Join a group whose rank 0 listens on `address:port`; blocks until all are there.

        Raises:
            RequestError: the name is in use, or the backend is not available.
            RuntimeError: the others did not come (torch's own error).
        """
        if name in self._groups:
            raise RequestError(f"the group {name!r} exists already")
        store = groups.connect(address, port, rank, world_size, timeout_s)
        try:
            self._groups[name] = groups.join(
                store,
                name,
                address=address,
                rank=rank,
                world_size=world_size,
                backend=backend,
                timeout_s=timeout_s,
            )
        except ValueError as error:
            raise RequestError(str(error)) from error

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            RequestError: there is no such group.
        """
        group = self._groups.pop(name, None)
        if group is None:
            raise RequestError(f"there is no group {name!r}")
        groups.leave(group)

    def receive(
        self, name: str, specs: Sequence[WeightSpec], *, is_bucket: bool
    ) -> dict[str, torch.Tensor]:
        """The weights that rank 0 broadcasts next: one by one, in order, or as one bucket.

        Raises:
            RequestError: no such group, or an impossible dtype or shape.
            RuntimeError: the broadcast failed (torch's own error).
        """
        group = self._groups.get(name)
        if group is None:
            raise RequestError(f"there is no group {name!r}; call init_weights_update_group first")
        _check(specs)
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        if is_bucket:
            num_bytes = sum(spec.num_bytes for spec in specs)
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            groups.broadcast(flat, group)
            return unflatten(specs, flat)
        received = {}
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=device)
            groups.broadcast(tensor, group)
            received[spec.name] = tensor
        return received


def _check(specs: Sequence[WeightSpec]) -> None:
    for spec in specs:
        try:
            num_bytes = spec.num_bytes
        except ValueError as error:
            raise RequestError(str(error)) from error
        if num_bytes > MAX_BYTES or any(size < 0 for size in spec.shape):
            raise RequestError(f"impossible shape {list(spec.shape[:8])}")
