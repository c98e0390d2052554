"""What a trainer answers to the weight transports, by the names that they call.

A part of `TorchTrainer`. Every rank is called with the same arguments; answers are rank 0's.
"""

from __future__ import annotations

from typing import Any

from rollmill.trainer.weight_sender import Report, WeightSender
from rollmill.trainer.weight_store import WeightStore


class WeightMethods:
    """Methods that stage weights and send them; see `WeightStore` and `WeightSender`."""

    _store: WeightStore
    _sender: WeightSender

    def stage_weights(self, *, dtype: str, keep: int | None = None) -> dict[str, Any]:
        """Keep the weights of now for engines; see `WeightStore.stage`."""
        return self._store.stage(dtype=dtype, keep=keep)

    def release_weights(self, *, keep: int | None = None) -> None:
        """Forget every stage but one."""
        self._store.release(keep=keep)

    def write_staged(self, *, stage: int, path: str) -> Report:
        """Write a stage as a folder."""
        return self._sender.write(stage, path)

    def write_delta(
        self, *, base: int, stage: int, path: str, base_version: int, version: int
    ) -> Report:
        """Write what leads from one stage to another."""
        return self._sender.write_delta(
            base, stage, path, base_version=base_version, version=version
        )

    def open_weight_group(self, *, address: str, timeout_s: float) -> Report:
        """Open a meeting point for engines."""
        return self._sender.listen(address, timeout_s)

    def join_weight_group(
        self, *, name: str, world_size: int, backend: str, timeout_s: float
    ) -> Report:
        """Wait for the engines at the meeting point."""
        return self._sender.join(name, world_size=world_size, backend=backend, timeout_s=timeout_s)

    def broadcast_weights(self, *, stage: int, max_bytes: int, backend: str) -> Report:
        """Send a stage to every engine of the group."""
        return self._sender.broadcast(stage, max_bytes=max_bytes, backend=backend)

    def lend_bucket(
        self,
        *,
        stage: int,
        number: int,
        max_bytes: int,
        on_gpu: bool,
        num_handles: int,
        num_pickles: int,
    ) -> Report:
        """Lend one bucket of a stage to engines on this machine."""
        return self._sender.lend(
            stage,
            number,
            max_bytes=max_bytes,
            on_gpu=on_gpu,
            num_handles=num_handles,
            num_pickles=num_pickles,
        )

    def take_back_bucket(self) -> Report:
        """Lend nothing any more."""
        return self._sender.take_back()

    def leave_weight_group(self) -> Report:
        """Leave the group."""
        return self._sender.leave()
