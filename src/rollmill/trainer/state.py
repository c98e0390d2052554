"""The trainer's complete state as files without pickle: safetensors for arrays, JSON for the rest.

Invariant: loading what was saved and training on gives the same next step, bit for bit, as
never having stopped (one rank, same number of threads). The learning-rate schedule is a function
of the number of optimizer steps, so that number is all there is to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollmill.errors import CheckpointError
from rollmill.trainer.ranks import like, whole

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer.json"
FORMAT_VERSION = 1

_SEPARATOR = "::"


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num_optimizer_steps: int,
    is_writer: bool = True,
) -> None:
    """Write master weights, optimizer moments, random state and step count into `folder`.

    Frozen weights (LoRA's base) are not written: they are in the model's own folder. With several
    ranks every one must call it, and the one that `is_writer` writes.

    Raises:
        CheckpointError: it cannot be written.
    """
    weights = _on_cpu(model_tensors(model))
    moments = _on_cpu({**_optimizer_tensors(model, optimizer), **_random_state()})
    if not is_writer:
        return
    state = {"format": FORMAT_VERSION, "num_optimizer_steps": num_optimizer_steps}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / MODEL_FILE)
        save_file(moments, folder / OPTIMIZER_FILE)
        (folder / STATE_FILE).write_text(json.dumps(state, indent=2))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the trainer's state cannot be written",
            where=str(folder),
            found=str(error),
            fix="make room on the disk, or lower run.keep_checkpoints",
        ) from error


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore what `save_state` wrote; returns the number of optimizer steps.

    Raises:
        CheckpointError: a file is missing or unreadable, or is of another model.
    """
    state = _read_json(folder / STATE_FILE)
    if state.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            "the trainer state has an unknown format",
            where=str(folder / STATE_FILE),
            expected=str(FORMAT_VERSION),
            found=str(state.get("format")),
        )
    _copy_into(model_tensors(model), _read_tensors(folder / MODEL_FILE), folder / MODEL_FILE)
    saved = _read_tensors(folder / OPTIMIZER_FILE)
    _restore_random_state(saved)
    _restore_moments(model, optimizer, saved, folder / OPTIMIZER_FILE)
    return int(state["num_optimizer_steps"])


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name, tied ones once."""
    tensors: dict[str, Tensor] = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    persistent = model.state_dict().keys()
    tensors |= {name: b for name, b in model.named_buffers() if name in persistent}
    return tensors


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}{_SEPARATOR}{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Tensor], where: Path
) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for entry, value in saved.items():
        name, _, key = entry.partition(_SEPARATOR)
        parameter = parameters.get(name)
        if parameter is None or value.shape not in (parameter.shape, torch.Size([])):
            raise _of_another_model(where, entry)
        is_moment = value.shape == parameter.shape
        placed = like(value, parameter) if is_moment else value.to(parameter.device)
        optimizer.state[parameter][key] = placed


def _copy_into(own: dict[str, Tensor], saved: dict[str, Tensor], where: Path) -> None:
    for name in own.keys() ^ saved.keys():
        raise _of_another_model(where, name)
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise _of_another_model(where, name)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(like(saved[name], tensor))


def _random_state() -> dict[str, Tensor]:
    states = {f"random{_SEPARATOR}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random{_SEPARATOR}cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_state(saved: dict[str, Tensor]) -> None:
    """Take the random states out of `saved` and set them."""
    cpu = saved.pop(f"random{_SEPARATOR}cpu", None)
    cuda = saved.pop(f"random{_SEPARATOR}cuda", None)
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return value


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "the trainer state cannot be read",
        where=str(path),
        expected="a file that the trainer wrote",
        found=f"{type(error).__name__}: {error}",
        fix="resume from another checkpoint",
    )


def _of_another_model(where: Path, name: str) -> CheckpointError:
    return CheckpointError(
        "the trainer state is of another model",
        where=str(where),
        expected="the tensors of the model that model.path names",
        found=f"{name} is missing, unexpected or of another shape",
        fix="use the model the run was started with, or a new run folder",
    )
