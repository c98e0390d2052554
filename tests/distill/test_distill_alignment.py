"""Recorded log-probs are of the tokens they stand beside, whoever computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from distill_helpers import World, brute_force, open_answers
from transformers import GenerationConfig

from rollmill.config.trainer import TrainerConfig
from rollmill.distill.measure import ReverseKl, load_model, reverse_kl
from rollmill.sample import Sample
from rollmill.sample_codec import encode_sample
from rollmill.trainer.worker import TorchTrainer


def test_scores_are_those_of_one_forward_pass_per_token(world: World, prepared: Path) -> None:
    for place in open_answers(world, prepared).draw(4, seed=1):
        row = place.read()
        prompt, response = row.prompt_tokens.tolist(), row.response_tokens.tolist()
        teacher = brute_force(world.teacher, prompt, response)
        student = brute_force(world.student, prompt, response)
        assert row.teacher_log_probs.tolist() == pytest.approx(teacher, abs=1e-4)
        assert row.student_log_probs.tolist() == pytest.approx(student, abs=1e-4)
        assert row.sampler_log_probs.tolist() == pytest.approx(student, abs=1e-4)


def test_the_trainer_scores_as_the_engines_did(world: World, prepared: Path) -> None:
    config = TrainerConfig(device="cpu", num_threads=1)
    trainer = TorchTrainer(
        config=config.model_dump(mode="json"),
        model_path=str(world.student),
        seed=0,
        num_total_steps=1,
        context_length=32,
    )
    rows = [place.read() for place in open_answers(world, prepared).draw(8, seed=2)]
    samples: list[Sample] = [row.to_sample(index=0, group_index=0, attempt=0) for row in rows]
    raw = trainer.score([encode_sample(sample) for sample in samples], temperature=1.0)
    for row, data in zip(rows, raw, strict=True):
        gaps = np.frombuffer(data, np.float32) - row.student_log_probs
        assert np.abs(gaps).max() < 1e-4


def test_the_measured_divergence_is_the_mean_of_the_sampled_one(world: World) -> None:
    """E over student tokens of log π − log π_teacher is the divergence that is summed exactly."""
    student, teacher = load_model(world.student), load_model(world.teacher)
    assert reverse_kl(student, student, [[5, 6, 37]], max_new_tokens=4, end_ids=[1]).per_token == 0
    measured: ReverseKl = reverse_kl(
        student, teacher, [[5, 6, 37]] * 2000, max_new_tokens=1, end_ids=[1], batch_size=500
    )
    with torch.no_grad():
        own, other = (
            torch.log_softmax(model(torch.tensor([[5, 6, 37]])).logits[0, -1].double(), -1)
            for model in (student, teacher)
        )
    assert measured.per_answer == pytest.approx(float((own.exp() * (own - other)).sum()), rel=1e-5)
    assert measured.num_tokens == measured.num_answers == 2000


def test_the_divergence_is_that_of_the_model_and_not_of_its_generation_defaults(
    world: World,
) -> None:
    teacher = load_model(world.teacher)

    def measured(defaults: dict[str, float]) -> ReverseKl:
        student = load_model(world.student)
        own = GenerationConfig(**defaults)
        student.generation_config = own
        found = reverse_kl(student, teacher, [[5, 6, 37]] * 32, max_new_tokens=8, end_ids=[1])
        assert student.generation_config is own
        return found

    changed = {"repetition_penalty": 1e4, "temperature": 0.01, "min_p": 0.9, "do_sample": True}
    assert measured(changed) == measured({})


def test_prompts_of_different_lengths_are_measured_as_each_by_itself(world: World) -> None:
    student, teacher = load_model(world.student), load_model(world.teacher)
    prompts = [[5, 6, 7, 8, 9, 38], [4, 38], [3, 5, 3, 38]]

    def first_state(chosen: list[list[int]]) -> float:
        return reverse_kl(student, teacher, chosen, max_new_tokens=1, end_ids=[1]).per_answer

    alone = [first_state([prompt]) for prompt in prompts]
    assert first_state(prompts) == pytest.approx(np.mean(alone), rel=1e-4)
