"""Moving new weights from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.base import Section


class WeightsConfig(Section):
    """Weight sync."""

    transport: Literal["disk", "distributed", "tensor", "delta"] = "disk"
    """`disk`: safetensors in a folder that trainer and engines share. `distributed`: broadcasts of
    torch.distributed from the trainer's memory to the engines'. `tensor`: engines on the trainer's
    machine copy the weights from its memory, which they get handles of. `delta`: only what changed,
    in the shared folder; embedded engines only. See docs/weight_sync.md."""
    dir: str | None = None
    """The shared folder; null takes `/dev/shm` when it is there and large enough, else the run
    folder. `distributed` and `tensor` use it only for engines that come back between two syncs."""
    pause_mode: Literal["abort", "retract", "in_place", "drain"] = "retract"
    """What running requests do while weights change. They go on afterwards from the tokens they
    have: with a fresh KV cache (`retract`), the old one (`in_place`), or as new requests (`abort`).
    `drain` waits for them to end first, so that every answer is of one version."""
    verify_checksum: bool = True
    """After each sync, compare the engines' checksums of all weights with the trainer's, while
    generation goes on. SGLang's checksums are compared with each other instead."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """For `distributed`. `gloo`: over the network, through CPU memory, anywhere. `nccl`: from GPU
    to GPU; trainer and engines must have different ones."""
    address: str = "127.0.0.1"
    """For `distributed`: this machine's address, as engines reach it."""
    bucket_mb: int = Field(256, ge=1)
    """For `distributed` and `tensor`: weights that are sent, or lent, at once."""
    timeout_s: float = Field(60.0, gt=0)
    """For `distributed`: how long trainer and engines wait for each other before a sync counts as
    failed. For `tensor`: how long an engine may take to copy one bucket."""
