"""Every loss learns a bandit: each prompt has one right answer, rewards are all there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trainer_testkit import tiny_llama

from rollmill.config.trainer import AlgorithmConfig, OptimizerConfig, TrainerConfig
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.trainer.algorithm import find_algorithm
from rollmill.trainer.critic import ValueModel
from rollmill.trainer.learner import Learner
from rollmill.trainer.policy import Policy

NUM_ANSWERS = 10
PROMPTS = [(10 + n, 10 + (3 * n) % 5) for n in range(5)]
ANSWERS = [(7 * n + 2) % NUM_ANSWERS for n in range(5)]
LENGTH = 2
MAX_STEPS = 60


def play(model: Any, number: int, n: int, generator: torch.Generator) -> Group:
    """`n` sampled answers of two tokens; the reward is the share of right ones."""
    tokens = torch.tensor([PROMPTS[number]] * n)
    log_probs = []
    with torch.no_grad():
        for _ in range(LENGTH):
            rows = model(tokens).logits[:, -1].log_softmax(-1)
            chosen = torch.multinomial(rows.exp(), 1, generator=generator)
            log_probs.append(rows.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
    answers, scores = tokens[:, -LENGTH:].numpy(), torch.cat(log_probs, 1).numpy()
    samples = [
        Sample(
            prompt_tokens=np.array(PROMPTS[number]),
            group_index=number,
            attempt=attempt,
            segments=[Segment.from_engine(answers[attempt], scores[attempt], 0)],
            status=Status.COMPLETED,
            reward=float(np.mean(answers[attempt] == ANSWERS[number])),
        )
        for attempt in range(n)
    ]
    return Group(number, samples)


def steps_to_learn(seed: int, algorithm: dict[str, Any], **changes: Any) -> int | None:
    """Training calls until the mean reward of sampled answers is above 0.95."""
    model = tiny_llama(seed, vocab_size=16)
    config = TrainerConfig(
        algorithm=AlgorithmConfig.model_validate(algorithm),
        optimizer=OptimizerConfig(lr=5e-3),
        **changes,
    )
    algorithm_parts = find_algorithm(config.algorithm)
    device = torch.device("cpu")
    critic = tiny_llama(seed + 10, vocab_size=16) if algorithm_parts.needs_critic else None
    learner = Learner(
        Policy(model, device=device),
        config,
        algorithm_parts,
        num_total_steps=MAX_STEPS,
        value_model=None if critic is None else ValueModel(critic, device=device),
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(MAX_STEPS):
        groups = [play(model, number, 16, generator) for number in range(len(PROMPTS))]
        metrics = learner.learn(
            groups, step=step, reward_key=None, max_new_tokens=LENGTH, temperature=1.0
        )
        if metrics["reward/mean"] > 0.95:
            return step
    return None


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "ppo_clip"},
        {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.28},
        {"loss": "cispo"},
        {"loss": "policy_gradient", "advantage": "rloo"},
        {"advantage": "reinforce_plus_plus"},
        {"advantage": "dr_grpo", "aggregation": "constant"},
        {"advantage": "ppo", "gae_lambda": 0.95},
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm.values())),
)
def test_a_bandit_is_learned(seed: int, algorithm: dict[str, Any]) -> None:
    # Two optimizer steps per batch: the second one is off policy, so ratios and clips matter.
    assert steps_to_learn(seed, algorithm, global_batch_size=40) is not None


def test_no_learning_without_advantages() -> None:
    assert steps_to_learn(0, {"advantage": "none"}) is None
