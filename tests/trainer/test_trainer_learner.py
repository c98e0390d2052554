"""One training call: invariances, denominators, refusals and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trainer_testkit import (
    ARGUMENTS,
    first_gradients,
    learner,
    make_group,
    mixed_groups,
    tiny_llama,
)

from rollmill.config.trainer import OptimizerConfig
from rollmill.errors import TrainerError
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.trainer.learner import Learner


def trained(how: Learner, groups: list[Group]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    metrics = how.learn(groups, **ARGUMENTS)
    return metrics, {n: p.detach().clone() for n, p in how.policy.model.named_parameters()}


ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"loss": "gspo", "aggregation": "per_token"},
    {"loss": "cispo", "aggregation": "constant", "importance_correction": "truncate"},
    {"advantage": "reinforce_plus_plus", "importance_correction": "mask"},
    {"kl_coef": 0.1, "entropy_coef": 0.01, "kl_estimator": "unbiased"},
    {"kl_coef": 0.1, "kl_placement": "reward", "advantage": "rloo"},
    {"advantage": "ppo", "gae_lambda": 0.9},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batches_chunks_layout_and_order_do_not_matter(
    algorithm: dict[str, Any], rng: np.random.Generator
) -> None:
    groups = mixed_groups(rng)
    common: dict[str, Any] = {"algorithm": algorithm, "reference": "kl_coef" in algorithm}
    reference = learner(layout="padded", **common)
    whole, expected = reference.learn(groups, **ARGUMENTS), first_gradients(reference)
    variants = [
        (groups, {"layout": "padded", "max_tokens_per_micro_batch": 1}),
        (groups, {"layout": "tree", "max_tokens_per_micro_batch": 30, "logprob_chunk_tokens": 2}),
        (groups, {"layout": "packed", "max_tokens_per_micro_batch": 40}),
        (groups[::-1], {"layout": "auto", "max_tokens_per_micro_batch": 64}),
    ]
    for given, changes in variants:
        how = learner(**common, **changes)
        metrics = how.learn(given, **ARGUMENTS)
        for name, gradient in first_gradients(how).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6)
        for name in ("loss/total", "optimizer/grad_norm", "mismatch/ess", "reward/mean"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-6), name
        assert metrics["tokens/trained"] == whole["tokens/trained"]


@pytest.mark.parametrize("algorithm", ALGORITHMS[:2])
def test_the_gradient_is_that_of_the_formula_written_out(
    algorithm: dict[str, Any], rng: np.random.Generator
) -> None:
    groups = mixed_groups(rng)
    how = learner(algorithm=algorithm)
    model = tiny_llama().double()
    total = torch.zeros((), dtype=torch.float64)
    attempts = [a for g in groups for a in g.attempts() if a[0].status is not Status.FAILED]
    num_tokens = sum(int(s.loss_mask.sum()) for a in attempts for s in a)
    for group in groups:
        kept = [a for a in group.attempts() if a[0].status is not Status.FAILED]
        rewards = np.array([a[0].scalar_reward() for a in kept])
        spread = rewards.std(ddof=1)
        for siblings, reward in zip(kept, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (spread + 1e-6) if spread else 0.0
            length = sum(int(s.loss_mask.sum()) for s in siblings)
            for sample in siblings:
                logits = model(torch.from_numpy(sample.tokens)[None].long()).logits[0] / 0.8
                rows = logits.log_softmax(-1)
                for offset in np.flatnonzero(sample.loss_mask):
                    position = len(sample.prompt_tokens) + offset
                    log_prob = rows[position - 1, int(sample.tokens[position])]
                    scale = num_tokens if algorithm else len(attempts) * length
                    total = total - advantage * log_prob / scale
    total.backward()
    squared = sum(float(p.grad.square().sum()) for p in model.parameters())
    assert how.learn(groups, **ARGUMENTS)["optimizer/grad_norm"] == pytest.approx(
        squared**0.5, rel=1e-5
    )


def test_what_lies_under_the_mask_does_not_matter(rng: np.random.Generator) -> None:
    def groups(hidden_log_prob: float) -> list[Group]:
        made = make_group(0, [1.0, 0.0], rng=np.random.default_rng(3))
        for sample in made.samples:
            masked = Segment([7, 8], [hidden_log_prob] * 2, False, 0, "engine")
            sample.segments = [*sample.segments, masked]
        return [made]

    first, weights = trained(learner(), groups(-1.0))
    second, others = trained(learner(), groups(-77.0))
    assert first["mismatch/log_prob_diff_max"] == second["mismatch/log_prob_diff_max"]
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_groups_without_spread_are_skipped_and_still_count(rng: np.random.Generator) -> None:
    groups = mixed_groups(rng)
    skipping = learner().learn(groups, **ARGUMENTS)
    dull = sum(s.response_length for s in groups[1].samples)
    assert skipping["tokens/skipped"] == dull
    assert skipping["groups/zero_spread_share"] == 0.25
    # An entropy term of (nearly) no weight forces every forward pass: the same gradient.
    forced = learner(algorithm={"entropy_coef": 1e-12}).learn(groups, **ARGUMENTS)
    assert forced["tokens/skipped"] == 0
    assert forced["optimizer/grad_norm"] == pytest.approx(skipping["optimizer/grad_norm"], rel=1e-6)


def test_a_batch_without_any_spread_changes_no_weight_and_says_so(
    rng: np.random.Generator,
) -> None:
    how = learner()
    before = {n: p.detach().clone() for n, p in how.policy.model.named_parameters()}
    metrics, after = trained(how, [make_group(0, [1.0, 1.0], rng=rng)])
    assert metrics["tokens/trained"] == 0
    assert metrics["optimizer/grad_norm"] == 0
    assert "policy/entropy" not in metrics
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_old_log_probs_are_from_before_the_first_optimizer_step(rng: np.random.Generator) -> None:
    groups = [make_group(i, [1.0, 0.0], rng=rng, log_prob=-4.0) for i in range(4)]
    metrics = learner(global_batch_size=2).learn(groups, **ARGUMENTS)
    assert metrics["optimizer/steps"] == 4
    assert metrics["policy/old_kl"] > 0
    one = learner().learn(groups, **ARGUMENTS)
    assert one["policy/old_kl"] == 0
    # The engine mismatch is measured against the policy before the call in both cases.
    assert metrics["mismatch/log_prob_diff_mean"] == pytest.approx(
        one["mismatch/log_prob_diff_mean"], rel=1e-5
    )


def test_rollout_log_probs_can_be_the_denominator(rng: np.random.Generator) -> None:
    groups = [make_group(0, [1.0, 0.0], rng=rng, lengths=[1, 1], log_prob=-30.0)]
    metrics = learner(algorithm={"old_log_probs": "rollout"}).learn(groups, **ARGUMENTS)
    assert metrics["policy/ratio_mean"] > 1e10
    assert metrics["policy/clip_fraction"] == 0.5
    # The engine's are still compared with the trainer's own, not with themselves.
    own = learner().learn(groups, **ARGUMENTS)
    for name in ("log_prob_diff_mean", "log_prob_diff_max", "weight_mean", "ess"):
        assert metrics[f"mismatch/{name}"] == pytest.approx(own[f"mismatch/{name}"], rel=1e-5)
    assert metrics["mismatch/log_prob_diff_mean"] > 20


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(rng: np.random.Generator) -> None:
    how = learner(algorithm={"old_log_probs": "rollout"})
    before = {n: p.detach().clone() for n, p in how.policy.model.named_parameters()}
    groups = [make_group(0, [0.0, 1.0], rng=rng, log_prob=-1e9)]
    with pytest.raises(TrainerError, match="training step 3"):
        how.learn(groups, **{**ARGUMENTS, "step": 3})
    assert all(torch.equal(before[n], p) for n, p in how.policy.model.named_parameters())
    assert all(p.grad is None for p in how.policy.model.parameters())
    assert how.num_optimizer_steps == 0


def test_greedy_answers_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(TrainerError, match="greedy"):
        learner().learn([make_group(0, [1.0, 0.0], rng=rng)], **{**ARGUMENTS, "temperature": 0.0})


def test_distillation_needs_a_teacher_log_prob_per_token(rng: np.random.Generator) -> None:
    how = learner(
        algorithm={"advantage": "none", "loss": "policy_gradient"},
        opd={"mode": "live", "teacher": {"path": "unused here"}},
    )
    group = make_group(0, [None, None], rng=rng)
    with pytest.raises(TrainerError, match="teacher's log-probs"):
        how.learn([group], **ARGUMENTS)
    for sample in group.samples:
        sample.teacher_log_probs = np.full(sample.response_length, -1.0, np.float32)
    metrics = how.learn([group], **ARGUMENTS)
    assert metrics["policy/teacher_kl"] < 0
    assert metrics["optimizer/grad_norm"] > 0


def test_empty_answers_and_empty_batches_are_harmless(rng: np.random.Generator) -> None:
    group = make_group(0, [1.0, 0.0], rng=rng, lengths=[0, 3])
    metrics = learner().learn([group], **ARGUMENTS)
    assert metrics["tokens/trained"] == 3
    assert metrics["response/length_min"] == 0
    failed = Sample(prompt_tokens=[1], status=Status.FAILED, failure="x")
    assert learner().learn([Group(0, [failed])], **ARGUMENTS)["samples/failed"] == 1


def test_the_learning_rate_follows_the_schedule_over_calls(rng: np.random.Generator) -> None:
    how = learner(double=False, global_batch_size=2)
    schedule = OptimizerConfig(lr=1.0, schedule="linear")
    how.config = how.config.model_copy(update={"optimizer": schedule})
    groups = [make_group(i, [1.0, 1.0], rng=rng) for i in range(2)]
    rates = [how.learn(groups, **{**ARGUMENTS, "step": step})["optimizer/lr"] for step in range(4)]
    # Eight optimizer steps from 1 to 0 by sevenths; two per call, reported as their mean.
    assert rates == pytest.approx([13 / 14, 9 / 14, 5 / 14, 1 / 14])
