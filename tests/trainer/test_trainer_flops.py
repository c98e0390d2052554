"""Model-FLOP utilization: the count by hand, and what is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_testkit import ARGUMENTS, learner, make_group, tiny_llama, tiny_qwen3
from transformers import MixtralConfig, MixtralForCausalLM

from rollmill.trainer.flops import active_parameters, measure_peak, step_operations
from rollmill.trainer.layout import TokenSequence
from rollmill.trainer.learner import Learner


def test_the_count_by_hand() -> None:
    model = tiny_llama()
    # Two blocks of q 32·32, k and v 32·16, o 32·32, three MLP matrices 32·48, two norms of 32; the
    # last norm; the tied embedding 61·32, used once as the output layer.
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 61 * 32
    # Four input tokens see 1 + 2 + 3 + 4 tokens, in 2 layers of width 32.
    sequence = TokenSequence(np.arange(5), np.array([4]))
    forward = 2 * weights * 4 + 4 * 2 * 32 * 10
    assert step_operations(model, [sequence]) == 3 * forward
    assert step_operations(model, [sequence] * 3) == 9 * forward
    model.requires_grad_(False)
    assert step_operations(model, [sequence]) == 2 * forward


def test_an_embedding_that_is_only_looked_up_does_not_count() -> None:
    tied, apart = tiny_llama(), tiny_llama(tie_word_embeddings=False)
    sequence = TokenSequence(np.arange(3), np.array([2]))
    assert step_operations(tied, [sequence]) == step_operations(apart, [sequence])
    assert step_operations(tiny_qwen3(), [sequence]) > 0


def test_of_a_mixture_the_experts_that_a_token_is_sent_to_count() -> None:
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    # q and o 32·32, k and v 32·16, the router 8·32, two of eight experts, three norms; the output
    # layer and an embedding.
    shared = 2 * 32 * 32 + 2 * 32 * 16 + 8 * 32 + 3 * 32 + 2 * 61 * 32
    assert active_parameters(MixtralForCausalLM(config)) == shared + 2 * 3 * 32 * 48
    assert active_parameters(tiny_llama()) == sum(p.numel() for p in tiny_llama().parameters())


def test_utilization_is_the_share_of_the_stated_peak(rng: np.random.Generator) -> None:
    groups = [make_group(0, [1.0, 0.0], rng=rng), make_group(1, [1.0, 1.0], rng=rng)]
    assert "mfu" not in learner().learn(groups, **ARGUMENTS)
    how: Learner = learner()
    how.peak_operations = 1e9
    metrics = how.learn(groups, **ARGUMENTS)
    trained = [TokenSequence(s.tokens, np.array([len(s.tokens) - 1])) for s in groups[0].samples]
    expected = step_operations(how.policy.model, trained) / metrics["seconds/total"] / 1e9
    assert metrics["mfu"] == pytest.approx(expected)


def test_a_measured_peak_is_a_rate() -> None:
    peak = measure_peak(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e15
