"""An algorithm of the user's own: functions in a file, named in the configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer_losses import batch, gradient, vector
from trainer_testkit import ARGUMENTS, learner, make_group, mixed_groups

from rollmill.config.trainer import AlgorithmConfig
from rollmill.errors import ConfigError, HookError
from rollmill.trainer.advantages import AdvantageInput
from rollmill.trainer.aggregation import StepTokens
from rollmill.trainer.algorithm import Algorithm, find_algorithm

EXAMPLE = Path(__file__).parents[2] / "examples" / "hooks" / "algorithm.py"
FUNCTIONS = {
    "advantage": "ranks",
    "loss": "tapered",
    "aggregation": "root_length",
    "importance_correction": "one_sided",
}
PARTS = {field: f"{EXAMPLE}:{function}" for field, function in FUNCTIONS.items()}


def example(**changes: Any) -> Algorithm:
    return find_algorithm(AlgorithmConfig.model_validate({**PARTS, **changes}))


def test_ranks_by_hand() -> None:
    inputs = AdvantageInput(
        rewards=np.array([5.0, 1.0, 1.0, 0.5, 7.0]),
        groups=np.array([0, 0, 0, 0, 1]),
        attempts=np.arange(5),
        masks=[np.array([True, False])] * 5,
    )
    first = [values[0] for values in example().advantages(inputs)]
    assert first == pytest.approx([1, 0, 0, -1, 0])
    assert all(values[1] == 0 for values in example().advantages(inputs))


def test_tapered_by_hand() -> None:
    tokens = batch(vector(math.log(2), math.log(2), math.log(0.5)), vector(1, -1, -1))
    found = example().loss(tokens, AlgorithmConfig())
    assert gradient(tokens, found.losses) == pytest.approx([-1, 1, 0.5])


def test_root_length_by_hand() -> None:
    ids = np.array([0, 0, 0, 0, 2])
    weights = example().token_weights(StepTokens(ids, ids, num_attempts=3, constant_length=9))
    assert weights == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 3])


def test_one_sided_by_hand() -> None:
    tokens = batch(vector(0, 0), vector(1, 1), gaps=vector(math.log(4), math.log(0.1)))
    weights = example().correction(tokens, AlgorithmConfig(importance_high=3.0))
    assert weights.raw.tolist() == pytest.approx([4, 0.1])
    assert weights.applied.tolist() == pytest.approx([3, 0.1])


def test_a_whole_algorithm_in_one_file_trains_and_reports(rng: np.random.Generator) -> None:
    how = learner(algorithm=PARTS)
    before = [parameter.detach().clone() for parameter in how.policy.model.parameters()]
    metrics = how.learn(mixed_groups(rng), **ARGUMENTS)
    assert 0 < metrics["policy/tapered"] <= 1
    assert metrics["optimizer/grad_norm"] > 0
    after = how.policy.model.parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("budget", [1, 30])
def test_micro_batches_do_not_change_it(budget: int, rng: np.random.Generator) -> None:
    groups = mixed_groups(rng)
    whole, cut = (
        learner(algorithm=PARTS, max_tokens_per_micro_batch=tokens).learn(groups, **ARGUMENTS)
        for tokens in (2048, budget)
    )
    for name in ("loss/total", "optimizer/grad_norm", "policy/tapered"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-6), name


@pytest.mark.parametrize("field", FUNCTIONS)
def test_an_unknown_name_is_told_with_the_known_ones(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.algorithm\.{field}"):
        example(**{field: "no_such_thing"})


def test_the_nearest_known_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean truncate"):
        example(importance_correction="truncat")


WRONG = """
import numpy as np
from rollmill.trainer.corrections import ImportanceWeights
def one_weight(step, config):
    return np.ones(1)
def not_a_number(step, config):
    return np.full(len(step.attempts), np.nan)
def one_factor(tokens, config):
    return ImportanceWeights(tokens.log_probs[:1], tokens.log_probs[:1])
"""


@pytest.mark.parametrize(
    ("field", "function", "told"),
    [
        ("aggregation", "one_weight", "one weight per token"),
        ("aggregation", "not_a_number", "finite numbers"),
        ("importance_correction", "one_factor", "one value per token"),
    ],
)
def test_what_is_unusable_is_named(
    field: str, function: str, told: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    groups = [make_group(0, [1.0, 0.0], rng=rng, lengths=[3, 4])]
    with pytest.raises(HookError, match=told) as caught:
        learner(algorithm={field: f"{tmp_path}/wrong.py:{function}"}).learn(groups, **ARGUMENTS)
    assert f"trainer.algorithm.{field}" in str(caught.value)
