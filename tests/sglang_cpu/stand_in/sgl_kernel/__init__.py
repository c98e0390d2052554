"""Stand-in for the CPU build of SGLang's kernels, which has no wheel.

SGLang imports names from here even on a CPU that its kernels do not support; there every operator
of theirs is guarded, and SGLang falls back to PyTorch. One function is within reach of a text
model; the others belong to speculative decoding and say so when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0+cpu.stand.in"

_SPECULATIVE = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, ends: Any, locations: Any, _width: int
) -> None:
    """Write each request's new cache locations, which lie one after the other, into its row."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = locations[done : done + end - start].to(table.dtype)
        done += end - start


def __getattr__(name: str) -> Callable[..., None]:
    if name not in _SPECULATIVE:
        raise AttributeError(name)

    def unavailable(*_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: this stand-in for sgl_kernel cannot do it")

    return unavailable
