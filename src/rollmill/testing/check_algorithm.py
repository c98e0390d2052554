"""Checks of the functions that run in the trainer: advantage, loss, aggregation, weights.

Imported only when one of them is checked, because it needs torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rollmill.config.trainer import AlgorithmConfig
from rollmill.errors import HookError, RollmillError
from rollmill.trainer.advantages import AdvantageInput
from rollmill.trainer.aggregation import StepTokens
from rollmill.trainer.algorithm import Algorithm, find_algorithm
from rollmill.trainer.losses import TokenBatch
from rollmill.trainer.objective import objective


def check_algorithm(name: str, path: str, *, base_dir: Path) -> None:
    """Call the function on made-up tokens, as a training step does.

    Two prompts with three answers each, of 1 to 5 tokens; one answer gives two samples, one token
    is out of the loss, and one group agrees on its reward.

    Args:
        name: the field of `trainer.algorithm`.
        path: `module:function` or `file.py:function`.
        base_dir: folder that files are relative to.

    Raises:
        HookError: it cannot be loaded, raises, or gives another shape, numbers that are not finite,
            or a loss that no gradient flows through.
    """
    config = AlgorithmConfig.model_validate({name: path})
    algorithm = find_algorithm(config, base_dir=base_dir)
    try:
        if name == "advantage":
            algorithm.advantages(_answers())
        elif name == "aggregation":
            algorithm.token_weights(_step())
        else:
            _check_objective(algorithm, path)
    except RollmillError:
        raise
    except Exception as error:  # noqa: BLE001 - what user code raises is what we look for
        raise HookError(
            "the function failed on made-up tokens",
            where=path,
            expected="a result for every token",
            found=f"{type(error).__name__}: {error}",
        ) from None


def _check_objective(algorithm: Algorithm, path: str) -> None:
    tokens = _tokens()
    total = objective(
        tokens, algorithm.config, algorithm.loss, correction=algorithm.correction
    ).losses
    if not bool(torch.isfinite(total).all()):
        raise HookError(
            "the function gave numbers that are not finite",
            where=path,
            expected="finite numbers",
            found=str(total.detach().tolist()),
        )
    if not total.requires_grad:
        raise HookError(
            "no gradient flows through the loss",
            where=path,
            expected="a loss computed from tokens.log_probs, not from a detached copy",
            found="a constant",
        )


_LENGTHS = (3, 1, 5, 2, 2, 4, 1)
_ATTEMPTS = np.array([0, 1, 2, 3, 3, 4, 5])


def _answers() -> AdvantageInput:
    masks = [np.ones(length, bool) for length in _LENGTHS]
    masks[2][1] = False
    return AdvantageInput(
        rewards=np.array([1.0, 0.0, 0.5, 1.0, 1.0, 1.0]),
        groups=np.array([0, 0, 0, 1, 1, 1]),
        attempts=_ATTEMPTS,
        masks=masks,
        values=[np.zeros(length) for length in _LENGTHS],
    )


def _step() -> StepTokens:
    samples = np.repeat(np.arange(len(_LENGTHS)), _LENGTHS)
    return StepTokens(
        attempts=_ATTEMPTS[samples], samples=samples, num_attempts=6, constant_length=8
    )


def _tokens() -> TokenBatch:
    random = torch.Generator().manual_seed(0)
    count = sum(_LENGTHS)
    old = -torch.rand(count, generator=random) * 3
    drift = torch.randn(count, generator=random) * 0.3
    return TokenBatch(
        log_probs=(old + drift).clamp(max=0).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old - 0.05,
        advantages=torch.randn(count, generator=random),
        sequences=torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)),
        num_sequences=len(_LENGTHS),
        entropies=torch.rand(count, generator=random),
    )
