"""Where the trainer's memory is: on its device while it trains, else with the CPU if need be.

Engines that share a GPU with the trainer need its memory while they write. Everything that the
trainer keeps between steps moves as a whole: weights, optimizer moments, critic, reference model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollmill.trainer.learner import Learner

CPU = torch.device("cpu")


class Placement:
    """Moves a learner's memory to the CPU and back.

    On a CPU, moving changes nothing.

    Args:
        learner: whose memory; it is on its device.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.is_offloaded = False

    def offload(self) -> None:
        """Give the device's memory back."""
        if self.is_offloaded:
            return
        self._move(CPU)
        self.is_offloaded = True
        if self._learner.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Take it again, with the same values."""
        if self.is_offloaded:
            self._move(self._learner.policy.device)
            self.is_offloaded = False

    def _move(self, device: torch.device) -> None:
        learner = self._learner
        models = {id(p.model): p.model for p in (learner.policy, learner.reference) if p}
        optimizers = [learner.optimizer]
        if learner.critic is not None:
            models[id(learner.critic.model.model)] = learner.critic.model.model
            optimizers.append(learner.critic.optimizer)
        for model in models.values():
            model.zero_grad(set_to_none=True)
            model.to(device)
        for optimizer in optimizers:
            move_moments(optimizer, device)


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimizer's tensors; step counts, which are scalars on the CPU, stay there."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if _is_moment(value):
                state[name] = value.to(device)


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
