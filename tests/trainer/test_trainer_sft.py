"""SFT is the cross entropy of the learned tokens, as anybody computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trainer_testkit import ARGUMENTS, VOCAB, first_gradients, learner, tiny_llama

from rollmill.errors import TrainerError
from rollmill.sample import Group, Sample, Segment, Status

SFT = {"advantage": "none", "loss": "sft", "aggregation": "per_token"}
AS_READ = {**ARGUMENTS, "temperature": 1.0}


def talks(count: int = 5) -> list[Group]:
    """Two-turn conversations: learned, not learned, learned; lengths differ."""
    rng = np.random.default_rng(0)

    def words(most: int) -> np.ndarray:
        return rng.integers(3, VOCAB, rng.integers(1, most))

    groups = []
    for number in range(count):
        segments = [
            Segment.from_data(words(9)),
            Segment.from_environment(words(5)),
            Segment.from_data(words(12)),
        ]
        sample = Sample(
            words(7), index=number, group_index=number, segments=segments, status=Status.COMPLETED
        )
        groups.append(Group(number, [sample]))
    return groups


def cross_entropy(groups: list[Group]) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """transformers' own loss (it takes logits as float32), averaged over all learned tokens."""
    model = tiny_llama().double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        (sample,) = group.samples
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        labels = ids.clone()
        labels[0, : len(sample.prompt_tokens)] = -100
        labels[0, len(sample.prompt_tokens) :][~torch.from_numpy(sample.loss_mask)] = -100
        learned = int(sample.loss_mask.sum())
        total = total + model(input_ids=ids, labels=labels).loss * learned
        count += learned
    loss = total / count
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_loss_and_gradient_are_those_of_masked_cross_entropy(layout: str) -> None:
    groups = talks()
    expected, gradients = cross_entropy(groups)
    how = learner(algorithm=SFT, layout=layout, max_tokens_per_micro_batch=64)
    metrics = how.learn(groups, **AS_READ)
    assert metrics["loss/total"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["sft/nll"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["sft/perplexity"] == pytest.approx(float(expected.exp()), rel=1e-6)
    assert metrics["tokens/trained"] == sum(int(g.samples[0].loss_mask.sum()) for g in groups)
    assert not [name for name in metrics if name.startswith(("mismatch/", "reward/"))]
    for name, found in first_gradients(how).items():
        torch.testing.assert_close(found, gradients[name], rtol=1e-4, atol=1e-7)


def test_an_algorithm_that_needs_the_sampled_log_probs_refuses_answers_without() -> None:
    settings: list[tuple[str, dict[str, Any]]] = [
        ("old_log_probs", {"algorithm": {"old_log_probs": "rollout"}}),
        ("importance_correction", {"algorithm": {"importance_correction": "truncate"}}),
        ("off_policy_mask_delta", {"algorithm": {"off_policy_mask_delta": 0.1}}),
        ("opd.importance", {"opd": {"mode": "offline", "importance": "truncate", "data": "x"}}),
    ]
    for name, changes in settings:
        changes["algorithm"] = {"advantage": "none", **changes.get("algorithm", {})}
        with pytest.raises(TrainerError, match="came without the log-probs") as caught:
            learner(**changes).learn(talks(), **AS_READ)
        assert name in str(caught.value)


def test_weights_of_answers_without_log_probs_are_not_reported() -> None:
    groups = talks()
    for sample in (sample for group in groups for sample in group.samples):
        sample.teacher_log_probs = np.full(sample.response_length, -1.0, np.float32)
    opd = {"mode": "live", "teacher": {"path": "unused"}}
    how = learner(algorithm={"advantage": "none", "loss": "policy_gradient"}, opd=opd)
    metrics = how.learn(groups, **AS_READ)
    assert "policy/teacher_kl" in metrics
    assert not [name for name in metrics if name.startswith(("opd/", "mismatch/"))]


def test_answers_with_recorded_log_probs_are_compared_with_the_policys() -> None:
    (group, *_) = talks(1)
    sample = group.samples[0]
    sample.segments = [Segment.from_data([5, 6], [-1.0, -2.0])]
    metrics = learner(algorithm=SFT).learn([group], **AS_READ)
    assert metrics["mismatch/log_prob_diff_mean"] > 0
