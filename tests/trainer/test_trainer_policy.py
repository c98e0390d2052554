"""Log-probs by chunks, trees and heads are those of a plain forward pass."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_testkit import VOCAB, tiny_llama, tiny_qwen3
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rollmill.trainer.layout import TokenSequence, plan_packed, plan_padded, plan_trees
from rollmill.trainer.logprobs import Head, chunked_log_probs, log_probs_from_logits
from rollmill.trainer.policy import Policy

CPU = torch.device("cpu")
plan_packed_without_mask = functools.partial(plan_packed, needs_mask=False)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def random_sequences(rng: np.random.Generator) -> list[TokenSequence]:
    items = []
    for family in range(3):
        prompt = rng.integers(3, VOCAB, 5)
        for _ in range(4):
            tokens = np.concatenate([prompt, rng.integers(3, 6, rng.integers(1, 9))])
            targets = [t for t in range(5, len(tokens)) if t == 5 or rng.random() < 0.8]
            items.append(TokenSequence(tokens, np.array(targets), family))
    return items


def plain_scores(model: Any, item: TokenSequence, temperature: float) -> tuple[Tensor, Tensor]:
    logits = model(torch.from_numpy(item.tokens)[None]).logits[0] / temperature
    rows = logits.log_softmax(-1)[item.targets - 1]
    chosen = rows.gather(1, torch.from_numpy(item.tokens[item.targets])[:, None])[:, 0]
    return chosen, -(rows.exp() * rows).sum(-1)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize(
    "planner", [plan_padded, plan_trees, plan_packed, plan_packed_without_mask]
)
def test_scores_and_gradients_equal_plain_forward_passes(
    make: Any, planner: Any, rng: np.random.Generator
) -> None:
    model = make().double()
    policy = Policy(model, device=CPU, chunk_tokens=3)
    assert policy.head is not None
    assert policy.can_use_trees
    assert not policy.needs_mask
    items = random_sequences(rng)
    weights = {n: torch.from_numpy(rng.normal(size=len(i.targets))) for n, i in enumerate(items)}
    expected = {n: plain_scores(model, item, 0.7) for n, item in enumerate(items)}
    torch.stack(
        [(weights[n] * (e[0] + 0.3 * e[1])).sum() for n, e in expected.items()]
    ).sum().backward()
    expected_gradients = gradients(model)
    for batch in planner(items, 50):
        log_probs, entropies = policy.log_probs(batch, temperature=0.7)
        sizes = [len(items[member].targets) for member in batch.members]
        wanted = torch.cat([weights[member] for member in batch.members])
        (wanted * (log_probs + 0.3 * entropies)).sum().backward()
        for member, ours, ours_entropy in zip(
            batch.members, log_probs.split(sizes), entropies.split(sizes), strict=True
        ):
            torch.testing.assert_close(ours, expected[member][0], rtol=0, atol=1e-6)
            torch.testing.assert_close(ours_entropy, expected[member][1], rtol=0, atol=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"bias": torch.linspace(-1, 1, 7, dtype=torch.float64)},
        {"scale": 0.25},
        {"softcap": 1.5},
        {"scale": 3.0, "softcap": 2.0},
    ],
)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_chunked_log_probs_and_their_gradients_equal_autograd(
    head: dict[str, Any], chunk_tokens: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    bias = head.get("bias")
    leaves = [hidden, weight]
    if bias is not None:
        bias.requires_grad_()
        leaves.append(bias)
    targets = torch.randint(0, 7, (9,))
    layer = Head(weight=weight, **head)
    upstream = torch.randn(2, 9, dtype=torch.float64)

    def results(scores: tuple[Tensor, Tensor]) -> list[Tensor]:
        total = (upstream[0] * scores[0]).sum() + (upstream[1] * scores[1]).sum()
        return [*scores, *torch.autograd.grad(total, leaves)]

    ours = results(
        chunked_log_probs(hidden, layer, targets, temperature=0.6, chunk_tokens=chunk_tokens)
    )
    plain = results(log_probs_from_logits(layer.logits(hidden), targets, temperature=0.6))
    for first, second in zip(ours, plain, strict=True):
        torch.testing.assert_close(first, second)


def test_entropy_without_gradient_costs_nothing_in_the_result() -> None:
    hidden = torch.randn(4, 5, requires_grad=True)
    head = Head(weight=torch.randn(7, 5, requires_grad=True))
    log_probs, _ = chunked_log_probs(
        hidden, head, torch.tensor([0, 1, 2, 3]), temperature=1.0, chunk_tokens=2
    )
    (ours,) = torch.autograd.grad(log_probs.sum(), hidden)
    plain, _ = log_probs_from_logits(
        head.logits(hidden), torch.tensor([0, 1, 2, 3]), temperature=1.0
    )
    (expected,) = torch.autograd.grad(plain.sum(), hidden)
    torch.testing.assert_close(ours, expected)


def special_models() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "granite": GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
        "cohere": CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
        "gemma2": Gemma2ForCausalLM(
            Gemma2Config(
                **SHAPE, head_dim=8, final_logit_softcapping=2.0, sliding_window=4, layer_types=None
            )
        ),
        "mistral": MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
        "bloom": BloomForCausalLM(  # makes its position biases of a flat mask
            BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
        ),
    }


@pytest.mark.parametrize("name", ["granite", "cohere", "gemma2", "mistral", "bloom"])
def test_models_with_special_heads_or_windows_score_like_themselves(
    name: str, rng: np.random.Generator
) -> None:
    model = special_models()[name].eval()
    policy = Policy(model, device=CPU, chunk_tokens=3)
    assert policy.head is not None
    assert policy.can_use_trees == (name in ("granite", "cohere"))
    items = random_sequences(rng)
    with torch.no_grad():
        for batch in policy.plan(items, 60):
            ours, _ = policy.log_probs(batch, temperature=0.9)
            expected = [plain_scores(model, items[m], 0.9)[0] for m in batch.members]
            torch.testing.assert_close(ours, torch.cat(expected), rtol=0, atol=2e-5)


def test_an_unknown_output_layer_falls_back_to_the_models_own_forward(
    rng: np.random.Generator,
) -> None:
    class Odd(type(tiny_llama())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * torch.linspace(0, 9, VOCAB)
            return output

    model = Odd(tiny_llama().config).eval()
    policy = Policy(model, device=CPU)
    assert policy.head is None
    items = random_sequences(rng)
    with torch.no_grad():
        for batch in policy.plan(items, 60):
            ours, _ = policy.log_probs(batch, temperature=1.0)
            expected = [plain_scores(model, items[m], 1.0)[0] for m in batch.members]
            torch.testing.assert_close(ours, torch.cat(expected), rtol=0, atol=2e-5)


def test_bfloat16_compute_keeps_float32_weights_and_stays_close(rng: np.random.Generator) -> None:
    model = tiny_llama()
    policy = Policy(model, device=CPU, compute_dtype=torch.bfloat16)
    items = random_sequences(rng)
    (batch,) = plan_padded(items, 1000)
    log_probs, _ = policy.log_probs(batch, temperature=1.0)
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact, _ = Policy(model, device=CPU).log_probs(batch, temperature=1.0)
    assert (log_probs - exact).abs().max() < 0.05


def test_no_vocabulary_sized_row_is_kept_for_the_backward_pass(rng: np.random.Generator) -> None:
    policy = Policy(tiny_llama(), device=CPU, chunk_tokens=4)
    (batch,) = plan_padded(random_sequences(rng), 1000)
    shapes: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.log_probs(batch, temperature=1.0)
    assert shapes
    assert not [shape for shape in shapes if len(shape) > 1 and shape[-1] == VOCAB]
