"""New weights for a model that is in use: all of them or none.

A checkpoint is read and checked completely before the first weight changes, so the old weights
stay on any failure. Checkpoints whose names and shapes are the model's own take the fast way,
tensor by tensor; others (such as mixtures of experts stored expert by expert) are read by
transformers' own loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rollmill.engine.embedded.loading import load_model
from rollmill.errors import ModelError
from rollmill.exchange.checksum import without_ties

INDEX_FILE = "model.safetensors.index.json"


def read_checkpoint(path: str, model: Any) -> dict[str, torch.Tensor]:
    """Every weight that `model` needs, from the folder `path`.

    Raises:
        ModelError: the folder, a file, a weight is missing or has the wrong shape.
    """
    own = own_weights(model)
    wanted = {name: tensor.shape for name, tensor in own.items()}
    found: Mapping[str, torch.Tensor] = _read_files(_weight_files(Path(path)))
    if not _is_complete(found, wanted, _tied_names(model)):
        found = _read_by_transformers(path, model, wanted)
    # Copied, and so really read: what is mapped only would be read during the engine's pause.
    return {name: found[name].to(tensor.dtype, copy=True) for name, tensor in own.items()}


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's parameters and saved buffers, tied ones once, by checkpoint name."""
    return without_ties(model.state_dict().items())


def replace_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Put checked weights into the model; the model may keep the tensors themselves.

    Must not be called while the model runs.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in weights.items():
            own = parameters.get(name, buffers.get(name))
            if isinstance(own, torch.nn.Parameter) and _is_alike(own, tensor):
                own.data = tensor  # no copy: the engine's pause stays short
            elif own is not None:
                own.copy_(tensor)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.device == other.device
        and other.is_contiguous()
        and not other.is_inference()
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            named = json.loads(index.read_text())["weight_map"].values()
            files = sorted({folder / name for name in named})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"the index is damaged: {error!r}", where=str(index)) from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "no weights there", where=str(folder), expected="a folder with *.safetensors files"
        )
    return files


def _read_files(files: list[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    found[name] = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the weights cannot be read: {error}", where=str(file)) from error
    return found


def _is_complete(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Size], tied: frozenset[str]
) -> bool:
    """Whether the files hold the model's weights under its own names.

    Raises:
        ModelError: the names are the model's own but a shape is wrong.
    """
    if not set(wanted) <= set(found) or set(found) - set(wanted) - tied:
        return False
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise ModelError(
                f"weight {name} has the wrong shape",
                expected=str(list(shape)),
                found=str(list(found[name].shape)),
            )
    return True


def _read_by_transformers(
    path: str, model: Any, wanted: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    loaded = load_model(path, model.dtype, torch.device("cpu"), model.config._attn_implementation)
    if type(loaded) is not type(model):
        raise ModelError(
            "the checkpoint holds another kind of model",
            where=path,
            expected=type(model).__name__,
            found=type(loaded).__name__,
        )
    found = loaded.state_dict()
    if not _is_complete(found, wanted, _tied_names(model)):
        raise ModelError("the checkpoint does not fit the model", where=path)
    return {name: found[name] for name in wanted}


def _tied_names(model: Any) -> frozenset[str]:
    """Names in the state dict that share another weight's memory."""
    state = model.state_dict()
    return frozenset(state) - frozenset(without_ties(state.items()))
