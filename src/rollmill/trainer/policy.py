"""A transformers model as a scorer of tokens: micro-batch in, log-probs and entropies out.

The model's body runs to the hidden states and the output layer is applied in chunks by
`logprobs`. What is not certain about a model is measured once, by running it on a few tokens: if
body and head do not reproduce the model's own logits, its full forward pass is used; if a prefix
tree does not reproduce plain sequences, neither trees nor packed rows are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rollmill.trainer import attention
from rollmill.trainer.flops import active_parameters
from rollmill.trainer.layout import (
    MicroBatch,
    TokenSequence,
    choose_plan,
    plan_packed,
    plan_padded,
    plan_trees,
)
from rollmill.trainer.logprobs import Head, chunked_log_probs, log_probs_from_logits

logger = logging.getLogger(__name__)

Planner = Callable[[Sequence[TokenSequence]], list[MicroBatch]]

PROBE_TOLERANCE = 1e-3
"""Largest difference of log-probs at which two ways of computing them count as the same."""


class Policy:
    """A language model that scores tokens.

    Args:
        model: a transformers causal language model with float32 (or float64) weights.
        device: where it runs.
        compute_dtype: precision of the matrix products; other than the weights' uses autocast.
        chunk_tokens: rows of logits held at once.
        layout: `padded`, `tree`, `packed` or `auto`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
        chunk_tokens: int = 512,
        layout: str = "auto",
    ) -> None:
        self.model: Any = model.to(device)
        self.device = device
        self.chunk_tokens = chunk_tokens
        self.weight_dtype = next(model.parameters()).dtype
        self.compute_dtype = (
            self.weight_dtype if self.weight_dtype == torch.float64 else compute_dtype
        )
        self._layout = layout
        self._root: Any = _Root(self.model, self._score)
        self.head = self._find_head()
        self.can_use_trees = layout != "padded" and self._trees_agree()
        self.needs_mask = not (self.can_use_trees and self._packing_agrees())

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that learning changes."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def plan(self, sequences: Sequence[TokenSequence], budget: int) -> list[MicroBatch]:
        """Micro-batches for `sequences`, in the cheapest layout this model allows."""
        if not self.can_use_trees:
            return plan_padded(sequences, budget)
        if self._layout == "tree":
            return plan_trees(sequences, budget)
        if self._layout == "packed":
            return plan_packed(sequences, budget, needs_mask=self.needs_mask)
        width, layer_parameters = _layer_shape(self.model)
        return choose_plan(
            sequences,
            budget,
            width=width,
            layer_parameters=layer_parameters,
            needs_mask=self.needs_mask,
        )

    def log_probs(self, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [K] of the wanted tokens of the members, in their order."""
        log_probs, entropies = self._root(batch, temperature)
        outputs = self._tensor(batch.outputs)
        return log_probs[outputs], entropies[outputs]

    def shard(self, num_ranks: int) -> None:
        """Spread weights, gradients and optimizer state over the ranks (FSDP2).

        Gradients are summed, not averaged: the weights of tokens hold the denominators already.
        From here on every call to `log_probs` and every backward pass is a joint one.
        """
        mesh = init_device_mesh(self.device.type, (num_ranks,))
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        layers = [module for module in self.model.modules() if type(module).__name__ in names]
        for module in [*layers, self._root]:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _score(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [E], one per entry of `batch.rows`."""
        rows = self._tensor(batch.rows)
        targets = self._tensor(batch.target_ids)
        if self.head is None:
            logits = self._run(self.model, batch).logits
            chosen = logits.reshape(-1, logits.shape[-1])[rows]
            return log_probs_from_logits(chosen, targets, temperature=temperature)
        states = self._run(self._body(), batch).last_hidden_state
        return chunked_log_probs(
            states.reshape(-1, states.shape[-1])[rows].to(self.compute_dtype),
            self.head.on(self.model.get_output_embeddings()),
            targets,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
        )

    def _run(self, module: Any, batch: MicroBatch) -> Any:
        with self._autocast():
            return module(
                input_ids=self._tensor(batch.input_ids),
                position_ids=self._tensor(batch.position_ids),
                use_cache=False,
                **self._visibility(batch),
            )

    def _visibility(self, batch: MicroBatch) -> dict[str, Any]:
        """The arguments of the forward pass that say who sees whom."""
        if batch.boundaries is not None:
            return attention.packed_arguments(
                batch.boundaries, device=self.device, dtype=self.compute_dtype
            )
        mask = batch.mask
        return {"attention_mask": None if mask is None else self._mask(mask)}

    def _mask(self, mask: np.ndarray[Any, Any]) -> Tensor:
        if mask.ndim == 2:
            return self._tensor(mask.astype(np.int64))
        visible = self._tensor(mask)
        lowest = torch.finfo(self.compute_dtype).min
        additive = torch.zeros(visible.shape, dtype=self.compute_dtype, device=self.device)
        return additive.masked_fill_(~visible, lowest)

    def _body(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == self.weight_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _find_head(self) -> Head | None:
        """The output layer, if applying it to the body's states gives the model's own logits."""
        layer = self.model.get_output_embeddings()
        if not isinstance(layer, nn.Linear) or not hasattr(
            self.model, self.model.base_model_prefix
        ):
            return None
        config = self.model.config
        divisor = getattr(config, "logits_scaling", None) or 1.0
        head = Head(
            weight=layer.weight,
            bias=layer.bias,
            scale=(getattr(config, "logit_scale", None) or 1.0) / divisor,
            softcap=getattr(config, "final_logit_softcapping", None),
        )
        (batch,) = plan_padded([_probe_sequence(self.vocab_size)], 64)
        with torch.no_grad():
            own = self._run(self.model, batch).logits.float()
            ours = head.logits(self._run(self._body(), batch).last_hidden_state)
        if _largest_gap(own.log_softmax(-1), ours.float().log_softmax(-1)) <= self._tolerance():
            return head
        logger.warning(
            "%s: the output layer is not a plain one; its own forward pass is used, which holds "
            "the logits of a whole micro-batch",
            type(self.model).__name__,
        )
        return None

    def _trees_agree(self) -> bool:
        """Whether every layer attends to everything before it, and a small tree gives the same."""
        if not _has_full_attention(self.model.config):
            return False
        return self._agrees_with_rows(lambda probes: plan_trees(probes, 64))

    def _packing_agrees(self) -> bool:
        """Let the model attend within boundaries, if it then gives the same."""
        if not attention.install(self.model):
            return False
        if self._agrees_with_rows(lambda probes: plan_packed(probes, 64, needs_mask=False)):
            return True
        attention.uninstall(self.model)
        return False

    def _agrees_with_rows(self, planner: Planner) -> bool:
        """Whether two short sequences that begin alike score as in padded rows.

        Policy: a model that cannot take the layout at all (one that makes biases of a flat mask)
        is one that does not agree.
        """
        first = _probe_sequence(self.vocab_size)
        other = first.tokens.copy()
        other[5:] = (other[5:] + 1) % self.vocab_size
        sequences = [first, TokenSequence(other, first.targets)]
        each = len(first.targets)

        def scores(plan: list[MicroBatch]) -> dict[int, Tensor]:
            (batch,) = plan
            with torch.no_grad():
                both, _ = self.log_probs(batch, temperature=1.0)
            return dict(zip(batch.members, both.view(2, each), strict=True))

        expected = scores(plan_padded(sequences, 64))
        try:
            found = scores(planner(sequences))
        except (TypeError, ValueError, RuntimeError) as error:
            logger.info("%s does not take the layout: %s", type(self.model).__name__, error)
            return False
        gap = max(_largest_gap(found[member], expected[member]) for member in (0, 1))
        return gap <= self._tolerance()

    def _tolerance(self) -> float:
        return PROBE_TOLERANCE if self.compute_dtype.itemsize >= 4 else 0.2


class _Root(nn.Module):
    """The outermost module: FSDP2 gathers the weights that no layer owns while this runs."""

    def __init__(self, model: nn.Module, score: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.model = model
        self._score = score

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self._score(batch, temperature)


def idle_batch() -> MicroBatch:
    """The smallest forward pass there is, for a rank that has to take part without work."""
    (batch,) = plan_padded([TokenSequence(np.array([0, 0]), np.array([1]))], 1)
    return batch


def _probe_sequence(vocab_size: int) -> TokenSequence:
    tokens = np.arange(3, 15) * 7919 % vocab_size
    return TokenSequence(tokens, np.arange(1, len(tokens)))


def _largest_gap(first: Tensor, second: Tensor) -> float:
    gap = (first - second).abs().max().item()
    return float("inf") if gap != gap else gap


def _has_full_attention(config: Any) -> bool:
    if getattr(config, "_attn_implementation", None) not in ("sdpa", "eager", attention.NAME):
        return False
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return all(kind == "full_attention" for kind in layer_types)
    window = getattr(config, "sliding_window", None)
    return window is None or getattr(config, "use_sliding_window", True) is False


def _layer_shape(model: Any) -> tuple[int, int]:
    """Attention width and parameters of one layer, for the cost model of the layouts."""
    config = model.config
    num_layers = max(int(getattr(config, "num_hidden_layers", 1)), 1)
    embedding = model.get_input_embeddings().weight.numel()
    total = active_parameters(model)
    heads = int(getattr(config, "num_attention_heads", 1))
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    return heads * head_dim, max(total - embedding, 1) // num_layers
