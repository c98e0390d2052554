"""LoRA: small trained matrices beside frozen weights (arXiv 2106.09685), through `peft`.

A linear layer W becomes W + (alpha/rank)·B·A, with A [rank, in] random and B [out, rank] zero at
first, so training starts from the model itself. The adapters are put into the model in place: to
the rest of the trainer it is the same model with few trained parameters: with several ranks, base
and adapters are sharded alike. What leaves the trainer for engines and people is merged, under the
names the model had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollmill.config.trainer import LoraConfig
from rollmill.errors import ConfigError
from rollmill.trainer.layout import MicroBatch
from rollmill.trainer.policy import Policy
from rollmill.trainer.ranks import whole

ADAPTER = "default"
"""Name of the one adapter, as peft calls it."""

_BASE = ".base_layer."
_MARKS = (".lora_A.", ".lora_B.")


class BasePolicy(Policy):
    """A policy with its adapters off: the reference model that LoRA gives for nothing.

    Args:
        policy: whose model, which it shares.
    """

    def __init__(self, policy: Policy) -> None:
        self.__dict__ = dict(policy.__dict__)

    def log_probs(self, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
        """As `Policy.log_probs`, under the base weights and without gradient."""
        with torch.no_grad(), adapters_off(self.model):
            return super().log_probs(batch, temperature=temperature)

    def shard(self, num_ranks: int) -> None:
        """Nothing to do: the model is the policy's."""


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freeze `model` and put adapters into its linear layers, in place.

    Raises:
        ConfigError: peft is not installed, or `target_modules` names no layer or the output layer.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "LoRA needs the package peft",
            where="trainer.lora",
            expected="peft to be installed",
            found=str(error),
            fix="pip install 'rollmill[lora]', or leave trainer.lora out",
        ) from error
    targets = config.target_modules
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    head = model.get_output_embeddings()
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise _bad_targets(config, str(error)) from error
    if model.get_output_embeddings() is not head or any(
        "embed" in name for name in adapted_layers(model)
    ):
        raise _bad_targets(config, "an embedding or the output layer")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter_weight(name))


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return any(mark in name for mark in _MARKS)


def base_name(name: str) -> str:
    """The name that a tensor had before adapters were put in."""
    return name.replace(_BASE, ".")


def adapted_layers(model: torch.nn.Module) -> Mapping[str, Any]:
    """The layers with an adapter, by the name of their weight before; empty without LoRA."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")
    }


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """The model as it was before training, while this lasts."""
    layers = list(adapted_layers(model).values())
    for layer in layers:
        _switch(layer, is_on=False)
    try:
        yield
    finally:
        for layer in layers:
            _switch(layer, is_on=True)


def delta_weight(layer: Any) -> Tensor:
    """(alpha/rank)·B·A, in the orientation of the layer's weight; with shards, every rank asks."""
    first, second = (whole(m[ADAPTER].weight.detach()) for m in (layer.lora_A, layer.lora_B))
    delta: Tensor = layer.scaling[ADAPTER] * (second @ first)
    return delta.T if layer.fan_in_fan_out else delta


def _switch(layer: Any, *, is_on: bool) -> None:
    """Turn a layer's adapters on or off and nothing else.

    peft also freezes what it turns off; sharding must not see that, or it would skip gradients.
    """
    layer.enable_adapters(is_on)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(is_adapter_weight(f".{name}"))


def _bad_targets(config: LoraConfig, found: str) -> ConfigError:
    return ConfigError(
        "LoRA cannot be put into these layers",
        where="trainer.lora.target_modules",
        expected="all-linear, or names of linear layers inside the model's blocks",
        found=f"{config.target_modules}: {found}",
        fix="name linear layers of the model, or write all-linear",
    )
