"""How busy the device is: operations that learning a step takes, over what the device could do.

The count is the usual one of model-FLOP utilization (PaLM, arXiv 2204.02311, appendix B): per token
2·P operations forward, and 4·L·W·(visible tokens) for attention; twice that backward, half of it
for the gradients of the weights, which frozen ones do not need. P is the number of weights that a
token is multiplied by (of a mixture, those of the experts it is sent to), L the layers, W heads ×
head size. Only real tokens count: padding, recomputation and passes that only score lower the
figure, as they should.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from rollmill.trainer.layout import TokenSequence

_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 4


def step_operations(model: Any, sequences: list[TokenSequence]) -> float:
    """Floating-point operations of learning from `sequences` once, each computed by itself.

    A layout that computes shared beginnings once does less, and gets the credit.
    """
    weights = _weights_per_token(model)
    layers, width = _attention_shape(model)
    total = 0.0
    for sequence in sequences:
        length = sequence.num_inputs
        total += 2.0 * weights * length + 4.0 * layers * width * length * (length + 1) / 2
    sizes = [(int(p.numel()), bool(p.requires_grad)) for p in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return (2 + trained / sum(size for size, _ in sizes)) * total


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square matrix product, the best of a few."""
    size = _SIZE.get(device.type, 1024)
    first, second = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        started = time.perf_counter()
        first @ second
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def active_parameters(model: Any) -> int:
    """Parameters that work on a token: routed experts by the share that a token is sent to."""
    config = model.config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = chosen / num_experts if chosen and num_experts else 1.0
    return round(
        sum(
            int(parameter.numel()) * (share if ".experts." in name else 1.0)
            for name, parameter in model.named_parameters()
        )
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _weights_per_token(model: Any) -> int:
    """All weights but an embedding that is only looked up; a tied one is the output layer too."""
    total = active_parameters(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is head.weight:
        return total
    return total - int(embedding.weight.numel())


def _attention_shape(model: Any) -> tuple[int, int]:
    config = model.config
    heads = int(getattr(config, "num_attention_heads", 1))
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    return int(getattr(config, "num_hidden_layers", 1)), heads * int(head_dim)
