"""Moving new weights from the trainer to the engines."""

from __future__ import annotations

from pathlib import Path

from rollmill.config import Config
from rollmill.weights.base import Transport
from rollmill.weights.delta import DeltaTransport
from rollmill.weights.disk import DiskTransport
from rollmill.weights.distributed import DistributedTransport
from rollmill.weights.tensor import TensorTransport


def open_transport(config: Config, run_dir: Path) -> Transport:
    """The transport that `weights.transport` names."""
    dtype = config.engine.embedded.dtype
    match config.weights.transport:
        case "disk":
            return DiskTransport(config.weights, run_dir, dtype=dtype)
        case "delta":
            return DeltaTransport(config.weights, run_dir, dtype=dtype)
        case "tensor":
            return TensorTransport(config.weights, run_dir, dtype=dtype)
        case "distributed":
            backend = config.weights.backend
            return DistributedTransport(config.weights, run_dir, dtype=dtype, backend=backend)
