"""Packed rows without a mask: attention within boundaries is attention under the block mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trainer_testkit import ARGUMENTS, first_gradients, learner, mixed_groups, tiny_llama

from rollmill.trainer import attention
from rollmill.trainer.policy import Policy
from rollmill.trainer.worker import recompute_activations

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Layer(torch.nn.Module):
    """What `attend` asks of an attention layer."""

    num_key_value_groups = HEADS // KV_HEADS
    is_causal = True


def random_row(num_tokens: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(
            1, heads, num_tokens, HEAD_DIM, dtype=torch.float64, generator=random
        ).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def under_mask(row: list[Tensor], lengths: list[int], scaling: float) -> Tensor:
    """[1, N, H, D] by the mask written out: the same sequence, and not later."""
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (owners[:, None] == owners) & torch.ones(len(owners), len(owners)).tril().bool()
    attended = scaled_dot_product_attention(*row, attn_mask=visible, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2)


def arguments(lengths: list[int]) -> dict[str, Any]:
    boundaries = np.cumsum([0, *lengths])
    given = attention.packed_arguments(boundaries, device=CPU, dtype=torch.float64)
    return {**given, "scaling": 0.3}


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_boundaries_and_block_mask_give_the_same_values_and_gradients(lengths: list[int]) -> None:
    row = random_row(sum(lengths))
    options = arguments(lengths)
    ours, _ = attention.attend(Layer(), *row, options.pop("attention_mask"), **options)
    expected = under_mask(row, lengths, 0.3)
    torch.testing.assert_close(ours, expected)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    ours_gradients = torch.autograd.grad((weights * ours).sum(), row)
    expected_gradients = torch.autograd.grad((weights * expected).sum(), row)
    torch.testing.assert_close(ours_gradients, expected_gradients)


def test_what_the_model_is_told() -> None:
    told = attention.packed_arguments(np.array([0, 2, 7]), device=CPU, dtype=torch.float32)
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 2, 7]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["max_length_q"] == told["max_length_k"] == 5
    assert told["attention_mask"].ndim == 4  # passed on by transformers as it is


def reference_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's documentation promises of `varlen_attn`, for a causal window, row by row."""
    assert cu_seq_q.dtype == torch.int32
    assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) == (max_q, max_k)
    assert is_causal or window_size == [-1, 0]
    assert enable_gqa == (query.shape[1] != key.shape[1])
    output = torch.empty_like(query)
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        for position in range(start, stop):
            for head in range(query.shape[1]):
                kv_head = head * key.shape[1] // query.shape[1]
                seen = slice(start, position + 1)
                scores = key[seen, kv_head] @ query[position, head]
                weights = (scores * (scale or query.shape[-1] ** -0.5)).softmax(0)
                output[position, head] = weights @ value[seen, kv_head]
    return output, query.new_zeros(query.shape[1], len(query)), torch.zeros(2)


def test_the_kernel_is_called_as_its_documentation_asks() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    varlen._varlen_attn.register_kernel("cpu", reference_kernel)
    lengths = [3, 1, 5]
    row = random_row(sum(lengths))
    options = arguments(lengths)
    with torch.no_grad():
        ours = attention.by_kernel(
            *row, starts=options["cu_seq_lens_q"], longest=options["max_length_q"], scaling=0.3
        )
        torch.testing.assert_close(ours, under_mask(row, lengths, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_cpu_has_no_kernel(dtype: torch.dtype) -> None:
    assert not attention.has_kernel(CPU, dtype, head_dim=64)


def test_a_model_that_can_be_told_needs_no_mask() -> None:
    model = tiny_llama()
    policy = Policy(model, device=CPU)
    assert not policy.needs_mask
    assert "rollmill" not in model.config.to_json_string()  # nothing of it is written to folders


def test_a_model_outside_the_interface_keeps_the_mask() -> None:
    class Old(type(tiny_llama())):  # type: ignore[misc]
        _supports_attention_backend = False

    policy = Policy(Old(tiny_llama().config).eval(), device=CPU)
    assert policy.can_use_trees
    assert policy.needs_mask


def test_a_model_that_drops_the_boundaries_is_noticed_and_keeps_the_mask() -> None:
    class Deaf(type(tiny_llama().model)):  # type: ignore[misc]
        def forward(self, *args: Any, cu_seq_lens_q: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = tiny_llama()
    model.model = Deaf(model.config).eval()
    model.tie_weights()
    policy = Policy(model, device=CPU)
    assert policy.needs_mask
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_recomputed_activations_attend_as_the_first_time(
    layout: str, rng: np.random.Generator
) -> None:
    groups = mixed_groups(rng)
    plain, saving = learner(layout=layout), learner(layout=layout)
    recompute_activations(saving.policy.model)
    for how in (plain, saving):
        how.learn(groups, **ARGUMENTS)
    expected = first_gradients(plain)
    for name, gradient in first_gradients(saving).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
