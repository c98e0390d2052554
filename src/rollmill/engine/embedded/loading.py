"""Reading a model folder, and refusing what the engine cannot run.

What transformers would let pass with a warning (weights that are missing and stay random, layers
that need another kind of cache) is an error here: an engine must never write plausible nonsense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from rollmill.engine.embedded import attention
from rollmill.errors import ModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_model(path: str, dtype: torch.dtype, device: torch.device, attention_name: str) -> Any:
    """A model in evaluation mode, without gradients.

    Raises:
        ModelError: no such folder, no causal LM in it, or one with unsupported layers.
    """
    if not Path(path).is_dir():
        raise ModelError(
            "the model folder does not exist",
            where=path,
            fix="check the path; models are never downloaded",
        )
    attention.register()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _check_layers(config.get_text_config(), path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention_name,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"the model cannot be loaded: {error}",
            where=path,
            fix="copy the model folder again, or serve this kind of model with SGLang",
        ) from error
    absent = sorted(report["missing_keys"])
    if absent:  # transformers would go on with random numbers in their place
        raise ModelError(
            f"weights are missing from the model: {absent[:3]}",
            where=path,
            fix="copy the model folder again: a file is missing or damaged",
        )
    model.to(device).eval().requires_grad_(False)
    return model


def _check_layers(config: Any, path: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or [])
    odd = sorted(kinds - _LAYER_TYPES)
    if getattr(config, "num_kv_shared_layers", 0):
        odd.append("layers that share keys and values")
    if odd:
        raise ModelError(
            f"the model has layers that the embedded engine cannot run: {', '.join(odd)}",
            where=path,
            expected="full or sliding-window attention in every layer",
            fix="serve this model with SGLang instead",
        )


def context_length_of(config: Any, wanted: int | None) -> int:
    """Most tokens of a sequence: `wanted`, or the model's own limit.

    Raises:
        ModelError: `wanted` is more than the model can do.
    """
    own = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is None:
        return own or 2048
    if own and wanted > own:
        raise ModelError(
            "the context length is more than the model can do",
            where="model.context_length",
            expected=f"at most {own}",
            found=str(wanted),
            fix="lower it, or leave it out to take the model's own",
        )
    return wanted


def pick_device(name: str) -> torch.device:
    """The device that a config names; `auto` takes the GPU when there is one.

    Raises:
        ModelError: a GPU is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "there is no CUDA device", where="engine.embedded.device", fix="set device: cpu"
        )
    return torch.device(name)
