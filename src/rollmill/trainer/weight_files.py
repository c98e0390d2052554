"""The policy as a Hugging Face folder: for engines after a step, for people at the end.

Invariant: `from_pretrained` of a written folder gives the trained weights, rounded once to the
asked precision; tied weights are stored once, under the name transformers expects, and adapters are
merged into the weights they belong to.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rollmill.errors import CheckpointError, ConfigError
from rollmill.exchange.buckets import specs_of
from rollmill.exchange.checksum import ALGORITHM, checksums_of, without_ties
from rollmill.trainer.lora import adapted_layers, base_name, delta_weight, is_adapter_weight
from rollmill.trainer.ranks import whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precisions by the name the configuration uses."""

TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
)
"""Files of a model folder that belong to its tokenizer."""


class WeightWriter:
    """Writes the weights again and again, and tells how much changed since the last time.

    Args:
        model: whose weights.
        is_writer: with several ranks every one must call `write`, and this one writes.
    """

    def __init__(self, model: Any, *, is_writer: bool = True) -> None:
        self._model = model
        self._is_writer = is_writer
        self._previous: dict[str, Tensor] = {}

    def write(self, folder: Path, *, dtype: str) -> dict[str, Any]:
        """Write config and weights to `folder`.

        Returns:
            `num_bytes`, `seconds` and `changed_share`: the share of elements, in the written
            precision, that differ from those written before (None the first time); and as
            `WeightStore.stage` has them: `weights`, `checksums`, `algorithm`. Nothing on ranks that
            do not write; on the one that does, `error` alone when it could not (a full disk), so
            that the other ranks go on.
        """
        start = time.perf_counter()
        tensors = engine_tensors(self._model, dtype)
        if not self._is_writer:
            return {}
        share = changed_share(self._previous, tensors)
        try:
            num_bytes = write_folder(self._model, tensors, folder, dtype=dtype)
        except (OSError, SafetensorError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self._previous = tensors
        weights = without_ties(tensors.items())
        return {
            "num_bytes": num_bytes,
            "weights": [[s.name, s.dtype, list(s.shape)] for s in specs_of(weights)],
            "checksums": checksums_of(weights),
            "algorithm": ALGORITHM,
            "changed_share": share,
            "seconds": time.perf_counter() - start,
        }


def export_folder(
    model: Any, folder: Path, *, source: Path, dtype: str, is_writer: bool = True
) -> None:
    """Write weights, config and the tokenizer files of `source` to `folder`.

    Raises:
        CheckpointError: it cannot be written.
    """
    tensors = engine_tensors(model, dtype)
    if not is_writer:
        return
    try:
        write_folder(model, tensors, folder, dtype=dtype)
        for pattern in TOKENIZER_PATTERNS:
            for file in sorted(source.glob(pattern)):
                if file.is_file() and not file.name.endswith((".safetensors", ".bin")):
                    shutil.copyfile(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the model cannot be exported",
            where=str(folder),
            found=str(error),
            fix="make room on the disk, remove what was written of the folder, and export again",
        ) from error


def engine_tensors(model: Any, dtype: str) -> dict[str, Tensor]:
    """The model's state on the CPU in `dtype` (integer buffers as they are), never shared with it.

    Raises:
        ConfigError: an unknown precision.
    """
    target = DTYPES.get(dtype)
    if target is None:
        raise ConfigError(
            "unknown precision for written weights",
            expected=", ".join(DTYPES),
            found=dtype,
        )
    owners = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    adapted = adapted_layers(model)
    copies: dict[int | str, Tensor] = {}
    tensors = {}
    for own_name, tensor in model.state_dict().items():
        if is_adapter_weight(own_name):
            continue
        owner, name = owners.get(own_name, own_name), base_name(own_name)
        if owner not in copies:
            is_float = tensor.is_floating_point()
            full = whole(tensor.detach())
            if name in adapted:
                full = full + delta_weight(adapted[name])
            copies[owner] = full.to("cpu", target if is_float else None, copy=True)
        tensors[name] = copies[owner]
    return tensors


def write_folder(model: Any, tensors: dict[str, Tensor], folder: Path, *, dtype: str) -> int:
    """Write `tensors` with the model's config; returns the bytes of weights written."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=dict(tensors))
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def changed_share(before: dict[str, Tensor], now: dict[str, Tensor]) -> float | None:
    """The share of elements that differ, tied ones counted once; None when the two are not
    versions of the same weights."""
    if before.keys() != now.keys() or not before:
        return None
    seen: set[int] = set()
    changed = total = 0
    for name, tensor in now.items():
        if tensor.data_ptr() in seen or before[name].dtype != tensor.dtype:
            continue
        seen.add(tensor.data_ptr())
        changed += int(torch.count_nonzero(tensor != before[name]))
        total += tensor.numel()
    return changed / total if total else None
