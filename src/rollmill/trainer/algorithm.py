"""The estimator and the loss that the configuration names, found once and before any training."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.config.opd import OpdConfig
from rollmill.config.trainer import AlgorithmConfig
from rollmill.errors import ConfigError, HookError
from rollmill.hooks import HookSignature, load_hook
from rollmill.trainer.advantages import (
    ESTIMATORS,
    NEEDS_CRITIC,
    NEEDS_NO_REWARD,
    PER_TOKEN_REWARD,
    AdvantageInput,
    Estimator,
)
from rollmill.trainer.aggregation import REDUCERS, Reducer, StepTokens
from rollmill.trainer.corrections import CORRECTIONS, Correction
from rollmill.trainer.losses import LOSSES, LossFunction
from rollmill.trainer.objective import is_zero_without_advantage

ADVANTAGE_HOOK = HookSignature(
    ("inputs: AdvantageInput", "config: AlgorithmConfig"), "Sequence[numpy.ndarray]", "sync"
)
"""A user's estimator: one vector per sample, one entry per response token."""
LOSS_HOOK = HookSignature(("tokens: TokenBatch", "config: AlgorithmConfig"), "TokenLosses", "sync")
"""A user's loss: one loss per trainable token."""
REDUCER_HOOK = HookSignature(
    ("step: StepTokens", "config: AlgorithmConfig"), "numpy.ndarray", "sync"
)
"""A user's aggregation: one weight per trainable token of an optimizer step."""
CORRECTION_HOOK = HookSignature(
    ("tokens: TokenBatch", "config: AlgorithmConfig"), "ImportanceWeights", "sync"
)
"""A user's importance correction: one factor per trainable token."""


@dataclass(frozen=True)
class Algorithm:
    """The replaceable parts, ready to call, and the distillation term when there is one."""

    config: AlgorithmConfig
    estimator: Estimator
    loss: LossFunction
    reducer: Reducer
    correction: Correction
    opd: OpdConfig | None = None

    @property
    def needs_reward(self) -> bool:
        """Whether samples without a reward are an error."""
        return self.config.advantage not in NEEDS_NO_REWARD

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator works on a critic's values."""
        return self.config.advantage in NEEDS_CRITIC

    @property
    def is_zero_without_advantage(self) -> bool:
        """Whether samples whose advantages are all 0 need no forward pass."""
        return is_zero_without_advantage(self.config, self.opd)

    def advantages(self, inputs: AdvantageInput) -> list[npt.NDArray[Any]]:
        """One checked vector per sample.

        Raises:
            HookError: a user's estimator returned something else.
        """
        if inputs.token_penalties is not None and self.config.advantage not in PER_TOKEN_REWARD:
            inputs = _penalties_in_reward(inputs)
        advantages = [np.asarray(values) for values in self.estimator(inputs, self.config)]
        found = [values.shape for values in advantages]
        expected = [mask.shape for mask in inputs.masks]
        name = f"advantage ({self.config.advantage})"
        if found != expected:
            raise _bad_result(name, f"shapes {expected}", f"shapes {found}")
        for number, values in enumerate(advantages):
            if not np.isfinite(values).all():
                raise _bad_result(name, "finite numbers", f"{values} for sample {number}")
        return advantages

    def token_weights(self, step: StepTokens) -> npt.NDArray[np.float64]:
        """The checked weight of each trainable token of an optimizer step, [T].

        Raises:
            HookError: a user's aggregation returned something else.
        """
        weights = np.asarray(self.reducer(step, self.config), np.float64)
        if weights.shape != step.attempts.shape:
            raise _bad_result(
                f"aggregation ({self.config.aggregation})",
                f"one weight per token: {step.attempts.shape}",
                str(weights.shape),
            )
        if not np.isfinite(weights).all():
            raise _bad_result(
                f"aggregation ({self.config.aggregation})", "finite numbers", str(weights)
            )
        return weights


def find_algorithm(
    config: AlgorithmConfig, *, base_dir: Path | None = None, opd: OpdConfig | None = None
) -> Algorithm:
    """The algorithm that `config` names.

    Args:
        config: the algorithm section.
        base_dir: folder that `file.py:function` is relative to.
        opd: the `opd` section; None, or a mode of `off`, leaves the term out.

    Raises:
        ConfigError: an unknown name; the nearest known one is suggested.
        HookError: a user's function cannot be loaded or called.
    """

    def find(field: str, known: Mapping[str, Any], hook: HookSignature) -> Any:
        value = getattr(config, field)
        if value in known:
            return known[value]
        return _from_hook(value, f"trainer.algorithm.{field}", hook, known, base_dir or Path.cwd())

    return Algorithm(
        config,
        estimator=find("advantage", ESTIMATORS, ADVANTAGE_HOOK),
        loss=find("loss", LOSSES, LOSS_HOOK),
        reducer=find("aggregation", REDUCERS, REDUCER_HOOK),
        correction=find("importance_correction", CORRECTIONS, CORRECTION_HOOK),
        opd=opd if opd is not None and opd.is_on else None,
    )


def _from_hook(
    path: str, name: str, expected: HookSignature, known: Iterable[str], base_dir: Path
) -> Any:
    if ":" not in path:
        near = [other for other in known if path and other.startswith(path)]
        near = near or difflib.get_close_matches(path, known, n=1)
        raise ConfigError(
            f"there is no {name.rpartition('.')[2]} of that name",
            where=name,
            expected=f"one of {', '.join(known)}, or `module:function`",
            found=path,
            fix=f"did you mean {near[0]}?" if near else "docs/algorithms.md explains each of them",
        )
    return load_hook(path, base_dir=base_dir, expected=expected, name=name)


def _penalties_in_reward(inputs: AdvantageInput) -> AdvantageInput:
    """Token penalties summed over each attempt's tokens and taken off its reward."""
    penalties: Sequence[Any] = inputs.token_penalties or ()
    rewards = inputs.rewards.copy()
    for attempt, values in zip(inputs.attempts, penalties, strict=True):
        rewards[attempt] -= values.sum()
    return AdvantageInput(rewards, inputs.groups, inputs.attempts, inputs.masks)


def _bad_result(where: str, expected: str, found: str) -> HookError:
    return HookError(
        "the function returned something unusable",
        where=f"trainer.algorithm.{where}",
        expected=expected,
        found=found,
    )
