"""How many experts a model routes each token to, from its configuration file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
"""What model configurations call it."""


def experts_shape_of(model_path: str) -> tuple[int, int] | None:
    """(layers, experts per token) of a model folder; None for a model without experts.

    Engines report routed experts as numbers without a shape: this is it. A folder that is not there
    has none.
    """
    try:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text("utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    config = config.get("text_config") or config
    top_k = next((config[name] for name in _TOP_K_NAMES if config.get(name)), None)
    layers = config.get("num_hidden_layers")
    return (int(layers), int(top_k)) if layers and top_k else None
