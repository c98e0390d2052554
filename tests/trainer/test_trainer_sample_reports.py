"""What the trainer tells about each sample after a step."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_testkit import ARGUMENTS, learner, make_group

from rollmill.sample import Sample, Segment, flatten
from rollmill.trainer.layout import TokenSequence
from rollmill.trainer.learner import Learner
from rollmill.trainer.scoring import score_sequences


def scores(how: Learner, sample: Sample) -> np.ndarray:
    """Log-probs of all response tokens under the learner's weights, on their own."""
    start = len(sample.prompt_tokens)
    targets = np.arange(start, start + sample.response_length)
    sequence = TokenSequence(sample.tokens, targets)
    (values,) = score_sequences(
        how.policy, [sequence], budget=512, temperature=ARGUMENTS["temperature"], ranks=how.ranks
    )
    return values


def reported(how: Learner) -> dict[int, np.ndarray]:
    return {
        report["index"]: np.frombuffer(report["trainer_log_probs"], np.float32)
        for report in how.sample_reports
    }


@pytest.mark.parametrize("source", ["recompute", "rollout"])
def test_log_probs_are_those_before_the_step(rng: np.random.Generator, source: str) -> None:
    groups = [make_group(number, [1.0, 0.0, 1.0], rng=rng) for number in range(3)]
    how = learner(algorithm={"old_log_probs": source})
    before = {sample.index: scores(how, sample) for sample in flatten(groups)}
    how.learn(groups, **ARGUMENTS)
    found = reported(how)
    assert found.keys() == before.keys()
    for index, values in before.items():
        np.testing.assert_allclose(found[index], values, atol=1e-5)
    after = scores(how, groups[0].samples[0])
    assert np.abs(after - before[groups[0].samples[0].index]).max() > 1e-3, "it learned"


def test_what_was_not_scored_is_not_a_number(rng: np.random.Generator) -> None:
    told = make_group(0, [1.0, 0.0], rng=rng, lengths=[3, 4])
    agreed = make_group(1, [1.0, 1.0], rng=rng, lengths=[2, 2])
    first = told.samples[0]
    first.segments = [*first.segments, Segment.from_environment([5, 6])]
    told.samples[1].fail("the engine was gone")
    told.samples += make_group(0, [0.0], rng=rng, lengths=[4]).samples
    told.samples[2].attempt, told.samples[2].index = 2, 7
    how = learner()
    how.learn([told, agreed], **ARGUMENTS)
    found = reported(how)
    assert found.keys() == {0, 7, 100, 101}, "a failed sample is not trained on"
    assert np.isfinite(found[0][:3]).all()
    assert np.isnan(found[0][3:]).all(), "the environment's tokens are not the model's"
    assert np.isnan(found[100]).all(), "an advantage of 0 needs no forward pass"


def test_advantages_are_those_of_the_estimator(rng: np.random.Generator) -> None:
    how = learner()
    how.learn([make_group(0, [1.0, 0.0, 0.0], rng=rng, lengths=[3, 1, 2])], **ARGUMENTS)
    rewards = np.array([1.0, 0.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    found = [report["advantage"] for report in how.sample_reports]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
