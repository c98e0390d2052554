"""Tiny random models and batches for the trainer's tests."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollmill.config.opd import OpdConfig
from rollmill.config.trainer import AlgorithmConfig, OptimizerConfig, TrainerConfig
from rollmill.sample import Group, Sample, Segment, Status
from rollmill.trainer.algorithm import find_algorithm
from rollmill.trainer.critic import ValueModel
from rollmill.trainer.learner import Learner
from rollmill.trainer.lora import add_adapters
from rollmill.trainer.policy import Policy
from rollmill.trainer.ranks import Ranks, whole

VOCAB = 61
AnyPolicy = TypeVar("AnyPolicy", bound=Policy)

torch.set_num_threads(1)


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    return Qwen3ForCausalLM(config).eval()


def make_group(
    index: int,
    rewards: list[float | dict[str, float] | None],
    *,
    rng: np.random.Generator,
    prompt_length: int = 5,
    lengths: list[int] | None = None,
    log_prob: float | None = None,
) -> Group:
    """A group with random tokens; answers use few tokens, so that they share beginnings."""
    prompt = rng.integers(3, VOCAB, prompt_length)
    lengths = lengths or rng.integers(1, 9, len(rewards)).tolist()
    samples = []
    for attempt, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        tokens = rng.integers(3, 6, length)
        log_probs = np.full(length, log_prob) if log_prob is not None else -rng.random(length) * 4
        samples.append(
            Sample(
                prompt_tokens=prompt,
                index=index * 100 + attempt,
                group_index=index,
                attempt=attempt,
                segments=[Segment.from_engine(tokens, log_probs, 0)] if length else [],
                status=Status.COMPLETED,
                reward=reward,
            )
        )
    return Group(index, samples)


ARGUMENTS: dict[str, Any] = {
    "step": 0,
    "reward_key": None,
    "max_new_tokens": 8,
    "temperature": 0.8,
}


def learner(
    *,
    double: bool = True,
    seed: int = 0,
    reference: bool = False,
    ranks: Ranks | None = None,
    **changes: Any,
) -> Learner:
    section = changes.pop("algorithm", {})
    opd = OpdConfig.model_validate(changes.pop("opd", {}))
    config = TrainerConfig(
        algorithm=AlgorithmConfig.model_validate(section),
        optimizer=OptimizerConfig(lr=1e-2, grad_clip=1e9),
        **changes,
    )

    def policy(number: int, kind: type[AnyPolicy]) -> AnyPolicy:
        model = tiny_llama(number)
        model = model.double() if double else model
        if config.lora is not None and number == seed:
            add_adapters(model, config.lora)
            randomize_adapters(model)
        return kind(
            model,
            device=torch.device("cpu"),
            chunk_tokens=config.logprob_chunk_tokens,
            layout=config.layout,
        )

    algorithm = find_algorithm(config.algorithm, opd=opd)
    return Learner(
        policy(seed, Policy),
        config,
        algorithm,
        num_total_steps=4,
        reference=policy(1, Policy) if reference else None,
        ranks=ranks,
        value_model=policy(2, ValueModel) if algorithm.needs_critic else None,
    )


def randomize_adapters(model: Any) -> None:
    """B is 0 in a new adapter, which hides half of the gradients: as after some training."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=random)


def mixed_groups(rng: np.random.Generator) -> list[Group]:
    """Four groups: a dull one, a fanned-out one, one with a failure and a masked sample."""
    groups = [
        make_group(0, [1.0, 0.0, 0.5, 0.0], rng=rng, log_prob=-4.0),
        make_group(1, [1.0, 1.0, 1.0, 1.0], rng=rng, log_prob=-4.0),
        make_group(2, [0.0, 1.0, 0.0, 0.0], rng=rng, log_prob=-4.1),
        make_group(3, [0.0, 0.3, 0.1, 0.9], rng=rng, log_prob=-4.2),
    ]
    sibling = dataclasses.replace(groups[2].samples[1], segments=[], index=999)
    sibling.segments = [
        Segment.from_engine([4, 5], [-4, -4], 0),
        Segment.from_environment([9, 9]),
        Segment.from_engine([3], [-4], 0),
    ]
    groups[2].samples.append(sibling)
    groups[3].samples[0].fail("engine died")
    groups[3].samples[1].in_loss = False
    return groups


def first_gradients(how: Learner) -> dict[str, torch.Tensor]:
    """The gradient of the only optimizer step so far: AdamW's first moment is (1 − β₁)·g."""
    scale = 1 - how.config.optimizer.betas[0]
    trained = [(n, p) for n, p in how.policy.model.named_parameters() if p.requires_grad]
    return {name: whole(how.optimizer.state[p]["exp_avg"]) / scale for name, p in trained}
