"""Attention of sequences laid end to end in one row, each seeing itself only, without a mask.

A mask costs the square of the row's length, in memory and in time. Here attention is told where the
sequences begin instead. `attend` takes the place of transformers' own function in a model (its
`AttentionInterface`), so any model that goes through that interface can be packed:

- on a GPU, in half precision: torch's variable-length FlashAttention, one kernel for the row;
- otherwise: `scaled_dot_product_attention` on one sequence after the other.

Both compute the same. A forward pass that names no boundaries is left to transformers.
"""

from __future__ import annotations

import functools
import inspect
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rollmill_packed"
"""Name of `attend` among transformers' attention implementations."""

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_MAX_KERNEL_HEAD_DIM = 256
_NOT_IN_KERNEL = ("softcap", "s_aux", "position_bias")


def install(model: Any) -> bool:
    """Let `model` attend through `attend`; False, and nothing changed, where it cannot."""
    if model.config._attn_implementation == NAME:
        return True
    if model.config._attn_implementation != "sdpa":
        return False
    if not getattr(model, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def uninstall(model: Any) -> None:
    """Undo `install`."""
    model.set_attn_implementation("sdpa")


def packed_arguments(
    boundaries: npt.NDArray[np.int64], *, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What a model's forward pass needs beside token and position ids, under transformers' names.

    Args:
        boundaries: int64 [S + 1], where the row's S sequences begin, and its end.
        device: of the model.
        dtype: compute precision.
    """
    starts = torch.from_numpy(boundaries.astype(np.int32)).to(device)
    longest = int(np.diff(boundaries).max())
    return {
        # A mask with four dimensions is passed on as it is; without one, transformers would make
        # the mask that this module is there to avoid.
        "attention_mask": torch.zeros(1, 1, 1, 1, device=device, dtype=dtype),
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it.

    Args:
        module: the attention layer.
        query: [B, H, N, D].
        key: [B, H_kv, N, D].
        value: [B, H_kv, N, D].
        attention_mask: as for SDPA; not looked at when there are boundaries.
        scaling: of the scores; None is 1/√D.
        cu_seq_lens_q: int32 [S + 1] boundaries of the only row (B = 1), or None.
        max_length_q: length of the longest sequence, when there are boundaries.
        rest: whatever else transformers hands on.

    Returns:
        [B, N, H, D], and None for the weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return _plain(module, query, key, value, attention_mask, scaling=scaling, **rest)
    dtype = _compute_dtype(query)
    if has_kernel(query.device, dtype, head_dim=query.shape[-1]) and not any(
        rest.get(name) is not None for name in _NOT_IN_KERNEL
    ):
        return by_kernel(
            *(tensor.to(dtype) for tensor in (query, key, value)),
            starts=cu_seq_lens_q,
            longest=max_length_q,
            scaling=scaling,
        ), None
    parts = [
        _plain(
            module,
            *(tensor[:, :, start:stop] for tensor in (query, key, value)),
            None,
            scaling=scaling,
            **rest,
        )[0]
        for start, stop in pairwise(cu_seq_lens_q.tolist())
    ]
    return torch.cat(parts, dim=1), None


def has_kernel(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> bool:
    """Whether one kernel attends within all sequences of a row at once."""
    return (
        dtype in _KERNEL_DTYPES
        and head_dim <= _MAX_KERNEL_HEAD_DIM
        and head_dim % 8 == 0
        and _device_has_kernel(device)
    )


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    starts: Tensor,
    longest: int,
    scaling: float | None,
) -> Tensor:
    """The same by torch's kernel for sequences of any length, in half precision on a GPU.

    Args:
        query: [1, H, N, D].
        key: [1, H_kv, N, D].
        value: [1, H_kv, N, D].
        starts: int32 [S + 1] boundaries.
        longest: length of the longest sequence.
        scaling: of the scores; None is 1/√D.

    Returns:
        [1, N, H, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_q=starts,
        cu_seq_k=starts,
        max_q=longest,
        max_k=longest,
        scale=scaling,
        window_size=(-1, 0),  # everything before, nothing after
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(Tensor, attended)[None]  # a pair only where more is asked for


def _plain(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    result: tuple[Tensor, None] = sdpa_attention_forward(*arguments, **options)
    return result


@functools.cache
def _device_has_kernel(device: torch.device) -> bool:
    """FlashAttention needs compute capability 8.0, and its interface a torch that has all of it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _compute_dtype(query: Tensor) -> torch.dtype:
    """What SDPA would compute in: autocast lowers its inputs, but not those of other kernels."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
