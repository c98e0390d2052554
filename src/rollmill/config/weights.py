"""Moving new weights from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from rollmill.config.base import Section


class WeightsConfig(Section):
    """Weight sync."""

    transport: Literal["disk"] = "disk"
    """`disk`: safetensors in a folder that trainer and engines share."""
    dir: str | None = None
    """That folder; null takes `/dev/shm` when it is there and large enough, else the run folder."""
    pause_mode: Literal["abort", "retract", "in_place"] = "retract"
    """What running requests do while weights change."""
    verify_checksum: bool = False
    """After each sync, compare a checksum of the weights of all engines (which must be of one
    kind). Costs each engine the time to read its weights once."""
