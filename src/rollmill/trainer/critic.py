"""The critic of PPO: a value for the state before every trainable token.

Its body is a language model of its own (by default the starting weights), with a linear layer
from hidden state to one number in place of the output layer. The layer starts at 0, so the first
advantages are those of no critic. It is trained after each optimizer step of the policy, on the
same tokens with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rollmill.config.trainer import TrainerConfig
from rollmill.trainer.layout import MicroBatch, TokenSequence
from rollmill.trainer.optimizer import apply_gradients, build_optimizer, not_finite
from rollmill.trainer.policy import Policy
from rollmill.trainer.ranks import Ranks
from rollmill.trainer.scoring import joint_plan, score_sequences


class ValueModel(Policy):
    """A `Policy` whose `log_probs` are values: [K] values and [K] zeros."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        width = self.model.get_input_embeddings().weight.shape[1]
        layer = nn.Linear(width, 1, bias=False, device=self.device, dtype=self.weight_dtype)
        nn.init.zeros_(layer.weight)
        self.model.value_head = layer

    def _score(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        layer = getattr(self.model, "value_head", None)
        if layer is None:  # the probes of the constructor, before there is one
            return super()._score(batch, temperature)
        states = self._run(self._body(), batch).last_hidden_state
        chosen = states.reshape(-1, states.shape[-1])[self._tensor(batch.rows)]
        values = layer(chosen.to(layer.weight.dtype)).squeeze(-1)
        return values, torch.zeros_like(values)


class Critic:
    """A value model and its optimizer.

    Args:
        model: the value model; sharded over the ranks by the caller.
        config: the trainer section.
        ranks: the processes that train together.
    """

    def __init__(self, model: ValueModel, config: TrainerConfig, ranks: Ranks) -> None:
        self.model = model
        self._config = config
        self._ranks = ranks
        settings = config.optimizer.model_copy(update={"lr": config.critic.lr})
        self.optimizer = build_optimizer(model.model, settings)

    def values(self, sequences: Sequence[TokenSequence]) -> list[npt.NDArray[np.float32]]:
        """Per sequence, the value before each of its targets."""
        return score_sequences(
            self.model,
            sequences,
            budget=self._config.max_tokens_per_micro_batch,
            temperature=1.0,
            ranks=self._ranks,
        )

    def learn(
        self,
        sequences: Sequence[TokenSequence],
        old_values: Sequence[npt.NDArray[Any]],
        returns: Sequence[npt.NDArray[Any]],
        weights: Sequence[npt.NDArray[Any]],
        *,
        step: int,
    ) -> dict[str, float]:
        """One optimizer step on the weighted value loss; its metrics.

        Args:
            sequences: what the values are of.
            old_values: per sequence, the values before the step.
            returns: per sequence, what the values should have been.
            weights: per sequence, the weight of each token in the whole step.
            step: for messages.
        """
        total = 0.0
        budget = self._config.max_tokens_per_micro_batch
        for batch in joint_plan(self.model, sequences, budget, self._ranks):
            values, _ = self.model.log_probs(batch, temperature=1.0)
            if not batch.members:
                torch.autograd.backward(values.sum() * 0)
                continue
            old, target, weight = (
                torch.from_numpy(np.concatenate([column[m] for m in batch.members])).to(values)
                for column in (old_values, returns, weights)
            )
            losses = value_loss(values, old, target, clip=self._config.critic.value_clip)
            loss = (losses * weight).sum()
            torch.autograd.backward(loss)
            total += float(loss.detach())
        total = float(self._ranks.sum(np.array([total]))[0])
        if not math.isfinite(total):
            self.optimizer.zero_grad(set_to_none=True)
            raise not_finite("value loss", total, step)
        norm = apply_gradients(
            self.optimizer,
            learning_rate=self._config.critic.lr,
            grad_clip=self._config.optimizer.grad_clip,
            step=step,
        )
        return {"critic/loss": total, "critic/grad_norm": norm}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> Tensor:
    """½·max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²) per token; ½·(V − R)² without clip.

    The value clip of PPO's reference implementation (OpenAI baselines): a value does not move
    further than `clip` from the old one at a time.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(plain, (near - returns).square()) / 2


def explained_variance(values: npt.NDArray[Any], returns: npt.NDArray[Any]) -> float:
    """1 − Var(R − V) / Var(R): 1 is a perfect critic, 0 no better than a constant."""
    variance = float(np.var(returns))
    return 1 - float(np.var(returns - values)) / variance if variance else 0.0
