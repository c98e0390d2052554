"""What an engine says that it is, as far as weights have to fit it."""

from __future__ import annotations

import msgspec


class ServerInfo(msgspec.Struct, frozen=True):
    """What an engine is.

    Attributes:
        tp_size: processes that share one copy of the weights, in SGLang.
        pp_size: stages of layers, each of `tp_size` processes.
        dp_size: copies of the weights.
        nnodes: machines that the engine runs on.
        device: where its weights are: `cpu`, `cuda`, or one GPU (`cuda:0`).
        engine: `sglang`, or the name of the embedded engine.
        machine: `exchange.machine_name` of the embedded engine.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    nnodes: int = 1
    device: str | None = None
    engine: str = "sglang"
    machine: str | None = None

    @property
    def is_embedded(self) -> bool:
        """Whether it is an embedded engine, which knows more than SGLang's calls."""
        return self.engine != "sglang"

    @property
    def num_ranks(self) -> int:
        """Processes that hold a part of the weights each."""
        return self.tp_size * self.pp_size

    @property
    def is_on_gpu(self) -> bool:
        """Whether its weights are in a GPU's memory that CUDA can lend."""
        return (self.device or "").startswith("cuda")
