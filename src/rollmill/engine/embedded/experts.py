"""Which experts each token was routed to, in models that have experts.

Noted as the model computes, by looking at what its experts are called with. Invariant: a sequence
has one entry per position that was computed for it, in order; what a cache would save is computed
anyway the first time, and what is computed again (after a retraction) keeps its first entry.
"""

from __future__ import annotations

import base64
import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch

from rollmill.engine.embedded.sequence import Sequence

_ROUTING_ARGUMENT = "top_k_index"
"""What transformers' experts call the experts of each token: `[tokens, top_k]`."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ExpertRecorder:
    """Notes the routing of one forward pass at a time.

    Args:
        model: a model of transformers.

    Attributes:
        has_experts: whether there is anything to note.
        is_on: the pass that runs is noted.
    """

    def __init__(self, model: Any) -> None:
        self.is_on = False
        self._seen: dict[int, torch.Tensor] = {}
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        self.has_experts = False
        for name, module in model.named_modules():
            layer = _LAYER.search(name)
            parameters = list(inspect.signature(module.forward).parameters)
            if layer is not None and _ROUTING_ARGUMENT in parameters:
                self.has_experts = True
                self._watch(module, int(layer[1]), parameters.index(_ROUTING_ARGUMENT))

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Before a forward pass: note its routing if one of its sequences wants it."""
        self._seen.clear()
        self.is_on = self.has_experts and any(s.experts is not None for s in sequences)

    def take(self) -> torch.Tensor | None:
        """After it: int32 `[tokens, layers, top_k]` on the CPU, zeros for dense layers; None when
        nobody wanted it."""
        if not self.is_on:
            return None
        some = next(iter(self._seen.values()))
        routed = torch.zeros((len(some), self._num_layers, some.shape[-1]), dtype=torch.int32)
        for layer, index in self._seen.items():
            routed[:, layer] = index.to("cpu", torch.int32)
        self._seen.clear()
        self.is_on = False
        return routed

    def _watch(self, module: Any, layer: int, place: int) -> None:
        def note(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self.is_on:
                index = named[_ROUTING_ARGUMENT] if place >= len(arguments) else arguments[place]
                self._seen[layer] = index.detach()

        module.register_forward_pre_hook(note, with_kwargs=True)


def note_experts(sequence: Sequence, start: int, routed: torch.Tensor) -> None:
    """Keep the routing of positions `[start, start + len(routed))`, those that are new."""
    if sequence.experts is None:
        return
    known = sequence.num_experts_noted
    if start <= known < start + len(routed):
        sequence.experts.append(routed[known - start :].clone())


def encode_experts(sequence: Sequence, count: int) -> str | None:
    """Base64 of little-endian int32 `[positions, layers, top_k]`, from the start that was asked for
    to the last token but one of the prompt and `count` output tokens; None when there is none, or
    when it was aborted before its prompt was computed."""
    end = len(sequence.prompt) + count - 1
    if not sequence.experts or sequence.num_experts_noted < end:
        return None
    routed = torch.cat(sequence.experts)[sequence.experts_start : end]
    return base64.b64encode(routed.numpy().astype("<i4").tobytes()).decode()
