"""Learning from a batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollmill.config.base import Section
from rollmill.config.model import Dtype


class AlgorithmConfig(Section):
    """Advantage, loss, and how per-token losses become one number."""

    advantage: str = "grpo"
    """Advantage estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline`, `ppo` (with a critic), `none`, or your `module:function`.
    (`gspo` and `cispo` use GRPO's estimator and are names for it.)"""
    loss: str = "ppo_clip"
    """Policy loss: `ppo_clip`, `gspo`, `cispo`, `policy_gradient`, `sft`, or your
    `module:function`."""
    aggregation: str = "per_rollout"
    """per_rollout: mean over attempts of the mean over their tokens. per_token: mean over all
    tokens of the step. constant (Dr.GRPO): mean over attempts of sum over tokens /
    `constant_length`. Or your `module:function`."""
    constant_length: int | None = Field(None, ge=1)
    """Divisor of `constant`; null takes the sampling limit max_new_tokens."""
    normalize_std: bool = True
    """GRPO: divide by the group's standard deviation."""
    gamma: float = Field(1.0, gt=0, le=1)
    """REINFORCE++ and PPO: discount per trainable token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """PPO: how far generalized advantage estimation looks ahead; 1 trusts returns, 0 the critic."""
    clip_low: float = Field(0.2, gt=0)
    """Ratio below 1 - clip_low is clipped (PPO, GSPO, CISPO)."""
    clip_high: float = Field(0.28, gt=0)
    """Ratio above 1 + clip_high is clipped (PPO, GSPO, CISPO)."""
    dual_clip: float | None = Field(None, gt=1)
    """PPO, GSPO: bound of the loss for negative advantages, as a multiple of them; null is off."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term to the reference model; 0 needs no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Per-token KL estimator; `unbiased` is k3 times the ratio to the old policy."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss, or take it off the reward before the advantages."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """Denominator of the ratio: recomputed by the trainer before the step (one extra forward
    pass, skipped when the batch is one optimizer step), or as the engine reported them."""
    importance_correction: str = "none"
    """Engine-to-trainer importance weights: `none`, outside the bounds `truncate` (TIS) or `mask`
    (IcePop), or your `module:function`."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """One weight per token, per sequence (product of its tokens' weights), or the geometric mean
    of those."""
    importance_low: float = Field(0.5, ge=0)
    """Lower bound of the importance weight."""
    importance_high: float = Field(2.0, gt=0)
    """Upper bound of the importance weight."""
    off_policy_mask_delta: float | None = Field(None, gt=0)
    """Off-policy sequence masking: sequences with negative advantage whose mean log-ratio to
    what the engine reported is below -delta leave the loss; null is off."""

    @model_validator(mode="after")
    def _parts_agree(self) -> AlgorithmConfig:
        if self.importance_correction != "none" and self.old_log_probs == "rollout":
            raise ValueError(
                "importance_correction: expected none with old_log_probs: rollout (the ratio "
                f"already starts from the engine's log-probs), found {self.importance_correction}"
            )
        if self.dual_clip is not None and self.loss in ("cispo", "policy_gradient", "sft"):
            raise ValueError(
                "dual_clip: expected null, since this loss has no clipped objective to bound "
                f"(ppo_clip and gspo have), found {self.dual_clip} with loss: {self.loss}"
            )
        if self.importance_low > self.importance_high:
            raise ValueError(
                f"importance_low: expected at most importance_high ({self.importance_high}), "
                f"found {self.importance_low}"
            )
        if self.kl_placement == "reward" and self.kl_estimator == "unbiased":
            raise ValueError(
                "kl_estimator: expected k1, k2 or k3 with kl_placement: reward (there is no new "
                "policy to weigh by yet), found unbiased"
            )
        return self


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


class LoraConfig(Section):
    """Low-rank adapters, trained instead of the weights; needs `pip install 'rollmill[lora]'`.

    Checkpoints hold the adapters only; engines and exports get merged weights.
    """

    rank: int = Field(16, ge=1)
    """Inner dimension of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Layers that get one: all linear ones but the output layer, or those whose names end so
    (`[q_proj, v_proj]`)."""


class CriticConfig(Section):
    """The value model of the `ppo` estimator; unused otherwise."""

    model: str | None = None
    """Folder of the model it starts from; null takes the policy's starting weights."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate, constant."""
    value_clip: float | None = Field(0.2, gt=0)
    """A value moves at most this far from the old one per step; null is off."""


class TrainerConfig(Section):
    """How the batch is worked through."""

    backend: Literal["torch"] = "torch"
    """Model backend."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    dtype: Dtype = "float32"
    """Compute precision; master weights are always float32."""
    num_ranks: int = Field(1, ge=1)
    """Processes that train together, sharing weights, gradients and optimizer state (FSDP2); the
    result is the same for any number. One per GPU; on a CPU 1 is fastest."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads of each rank; null shares out all cores."""
    global_batch_size: int | None = Field(None, ge=1)
    """Attempts per optimizer step; must divide batch_size × n_samples_per_prompt. Null makes
    the whole batch one step."""
    max_tokens_per_micro_batch: int = Field(2048, ge=1)
    """Padded or packed tokens in one forward pass; a longer sample goes alone."""
    layout: Literal["auto", "padded", "tree", "packed"] = "auto"
    """How answers share a forward pass: padded rows, one prefix tree per prompt that computes
    every shared beginning once, or packed rows of answers end to end. auto takes the cheapest.
    Same result."""
    logprob_chunk_tokens: int = Field(512, ge=1)
    """Tokens whose vocabulary-sized logits are held at once."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    reference_model: str | None = None
    """Folder of the reference model for the KL term; null takes the starting weights."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of one rank's device at `dtype`, in 10¹² operations per second, for the `mfu` metric;
    null measures it with a large matrix product at start-up."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; null trains the weights."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage and loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    critic: CriticConfig = CriticConfig()
    """The critic of the `ppo` estimator."""
