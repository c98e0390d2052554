"""The whole objective of a batch of tokens: policy loss, corrections, KL and entropy, per token.

`objective` only combines what `losses`, `corrections`, `distillation` and `kl` define. It returns
per-token streams; the caller multiplies `losses` by the weights of the whole step (`aggregation`)
and adds them up, and averages the streams into metrics.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rollmill.config.opd import OpdConfig
from rollmill.config.trainer import AlgorithmConfig
from rollmill.errors import HookError
from rollmill.trainer.corrections import CORRECTIONS, Correction, off_policy_mask
from rollmill.trainer.distillation import distilled
from rollmill.trainer.kl import kl_divergence
from rollmill.trainer.losses import SCALES_WITH_ADVANTAGE, LossFunction, TokenBatch, TokenLosses


def objective(
    tokens: TokenBatch,
    config: AlgorithmConfig,
    policy_loss: LossFunction,
    opd: OpdConfig | None = None,
    *,
    correction: Correction | None = None,
) -> TokenLosses:
    """Per-token total loss of `tokens`, and the detached streams it was made of.

    total = w·m·policy + kl_coef·KL − entropy_coef·H, with the importance weight w and the
    off-policy mask m as constants.

    Args:
        tokens: trainable tokens of whole samples.
        config: the algorithm section.
        policy_loss: the loss that `config.loss` names.
        opd: the distillation term; None has none.
        correction: the importance weights that `config.importance_correction` names; None looks
            them up among the built-in ones.
    """
    streams: dict[str, Tensor] = {}
    if opd is not None:
        taught = distilled(tokens, opd)
        tokens = replace(tokens, advantages=taught.advantages)
        streams |= taught.streams
    policy = policy_loss(tokens, config)
    weights = (correction or CORRECTIONS[config.importance_correction])(tokens, config)
    factor = _checked("importance_correction", weights.applied, tokens, config).detach()
    if config.off_policy_mask_delta is not None:
        kept = off_policy_mask(tokens, config.off_policy_mask_delta)
        factor = factor * kept
        streams["off_policy_masked"] = 1 - kept
    total = factor * _checked("loss", policy.losses, tokens, config)
    streams |= dict(policy.streams)
    streams |= {"policy_loss": total.detach(), "importance_weight": weights.raw.detach()}
    total = total + _extra_terms(tokens, config, streams)
    return TokenLosses(total, {"loss": total.detach(), **streams})


def _extra_terms(
    tokens: TokenBatch, config: AlgorithmConfig, streams: dict[str, Tensor]
) -> Tensor | float:
    """KL and entropy terms, per token; what they measure goes to `streams`."""
    extra: Tensor | float = 0.0
    if tokens.reference_log_probs is not None and config.kl_placement == "loss":
        kl = kl_divergence(
            tokens.log_probs,
            tokens.reference_log_probs,
            config.kl_estimator,
            log_ratio=tokens.log_ratios,
        )
        streams["reference_kl"] = kl.detach()
        extra = extra + config.kl_coef * kl
    if tokens.entropies is not None:
        streams["entropy"] = tokens.entropies.detach()
        if config.entropy_coef:
            extra = extra - config.entropy_coef * tokens.entropies
    return extra


def _checked(field: str, values: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """What a function of the user's returned, if there is one value per token."""
    if values.shape == tokens.log_probs.shape:
        return values
    raise HookError(
        "the function returned the wrong shape",
        where=f"trainer.algorithm.{field} ({getattr(config, field)})",
        expected=f"one value per token: {tuple(tokens.log_probs.shape)}",
        found=str(tuple(values.shape)),
    )


def is_zero_without_advantage(config: AlgorithmConfig, opd: OpdConfig | None = None) -> bool:
    """Whether a sample whose advantages are all 0 has no gradient: it needs no forward pass."""
    has_other_terms = bool(
        config.entropy_coef or (config.kl_coef and config.kl_placement == "loss")
    )
    return config.loss in SCALES_WITH_ADVANTAGE and not has_other_terms and opd is None
