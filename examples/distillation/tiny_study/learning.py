"""Learning with rollmill's trainer, in this process, and measuring with its `reverse_kl`.

Everything that learns here (teachers, students' SFT, every arm) is a `Learner` with the `Algorithm`
that a configuration of `rollmill train` would name.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollmill.config.opd import OpdConfig
from rollmill.config.trainer import AlgorithmConfig, OptimizerConfig, TrainerConfig
from rollmill.distill.measure import reverse_kl
from rollmill.trainer.algorithm import find_algorithm
from rollmill.trainer.learner import Learner
from rollmill.trainer.policy import Policy
from tiny_study.answers import Answer, accuracy, draw
from tiny_study.task import CONTEXT_LENGTH, END, MAX_NEW_TOKENS, prompt_ids

EXAMPLE = Path(__file__).parents[1]
"""Where the custom losses of the arms are."""

SFT = {"advantage": "none", "loss": "sft", "aggregation": "per_token"}
WARMUP_STEPS = 10
BATCHES_TOKENS = 8192
"""Tokens in one forward pass: every batch of the study is one."""


@dataclass
class Costs:
    """What was spent: seconds by phase, tokens that were drawn, tokens that a teacher scored."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    generated: int = 0
    scored: int = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time of a block."""
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started


def make_learner(
    model: Any,
    algorithm: dict[str, Any],
    *,
    lr: float,
    num_steps: int,
    opd: OpdConfig | None = None,
) -> Learner:
    """A learner that changes `model` in place."""
    config = TrainerConfig(
        algorithm=AlgorithmConfig(**algorithm),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=WARMUP_STEPS),
        max_tokens_per_micro_batch=BATCHES_TOKENS,
    )
    return Learner(
        Policy(model, device=torch.device("cpu")),
        config,
        find_algorithm(config.algorithm, base_dir=EXAMPLE, opd=opd),
        num_total_steps=num_steps,
        context_length=CONTEXT_LENGTH,
    )


def learn(learner: Learner, answers: Sequence[Answer], step: int) -> dict[str, float]:
    """One optimizer step."""
    return learner.learn(
        [answer.to_group(number) for number, answer in enumerate(answers)],
        step=step,
        reward_key=None,
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
    )


@dataclass(frozen=True)
class Measured:
    """A student at one moment, on fresh answers to held-out prompts.

    Attributes:
        step: optimizer steps it has had.
        kl: reverse KL to the teacher per answer, in nats.
        kl_error: its standard error, over answers.
        kl_per_token: the same per token.
        accuracy: share of right answers at temperature 1.
    """

    step: int
    kl: float
    kl_error: float
    kl_per_token: float
    accuracy: float


def measure(model: Any, teacher: Any, prompts: Sequence[str], *, step: int, seed: int) -> Measured:
    """Measure a student; the draws of a seed use the same random numbers for every student."""
    divergence = reverse_kl(
        model,
        teacher,
        [prompt_ids(prompt) for prompt in prompts],
        max_new_tokens=MAX_NEW_TOKENS,
        end_ids=[END],
        seed=seed,
        batch_size=len(prompts),
    )
    fresh = draw(model, prompts, seed)
    return Measured(
        step,
        divergence.per_answer,
        divergence.standard_error,
        divergence.per_token,
        accuracy(fresh),
    )
