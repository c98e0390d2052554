"""Learning from a batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.base import Section
from rollmill.config.model import Dtype


class AlgorithmConfig(Section):
    """Advantage, loss, and how per-token losses become one number."""

    advantage: str = "grpo"
    """Advantage estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline`, or your `module:function`."""
    loss: str = "ppo_clip"
    """Policy loss: `ppo_clip`, `gspo`, `cispo`, `policy_gradient`, or your `module:function`."""
    aggregation: Literal["per_rollout", "per_token", "constant"] = "per_rollout"
    """per_rollout: mean over attempts of the mean over their tokens. per_token: mean over all
    tokens of the step. constant (Dr.GRPO): sum over tokens / `constant_length`, mean over attempts."""
    constant_length: int | None = Field(None, ge=1)
    """Divisor of `constant`; null takes the sampling limit max_new_tokens."""
    normalize_std: bool = True
    """GRPO: divide by the group's standard deviation."""
    clip_low: float = Field(0.2, gt=0)
    """PPO: ratio below 1 - clip_low is clipped."""
    clip_high: float = Field(0.28, gt=0)
    """PPO: ratio above 1 + clip_high is clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """PPO: bound of the loss for negative advantages; null is off."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term to the reference model in the loss; 0 needs no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """Denominator of the ratio: recomputed by the trainer before the step (one extra forward
    pass, skipped when the batch is one optimizer step), or as the engine reported them."""
    importance_correction: Literal["none", "truncate", "mask"] = "none"
    """Engine-to-trainer importance weights: truncated (TIS) or masked outside the bounds."""
    importance_low: float = Field(0.5, ge=0)
    """Lower bound of the importance weight."""
    importance_high: float = Field(2.0, gt=0)
    """Upper bound of the importance weight."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; not applied to norms and biases."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps from 0 to the peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak at the end of a decaying schedule."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""


class TrainerConfig(Section):
    """How the batch is worked through."""

    backend: Literal["torch"] = "torch"
    """Model backend."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    dtype: Dtype = "float32"
    """Compute precision; master weights are always float32."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; null takes all cores."""
    global_batch_size: int | None = Field(None, ge=1)
    """Attempts per optimizer step; must divide batch_size × n_samples_per_prompt. Null makes
    the whole batch one step."""
    max_tokens_per_micro_batch: int = Field(4096, ge=1)
    """Padded or packed tokens in one forward pass; a longer sample goes alone."""
    logprob_chunk_tokens: int = Field(512, ge=1)
    """Tokens whose vocabulary-sized logits are held at once."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage and loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
