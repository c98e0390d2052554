"""The attention that transformers' models call when the embedded engine runs them.

A step's tokens are one flat row, `[1, T]`: first one token per decoding sequence, then the chunks
of prompts. Everything in the model but attention treats tokens alone, so only this function must
know which token belongs to which sequence. It writes the new keys and values where they belong
and attends to them in place: per row size one batched call for decoding, per prompt chunk one
call.

Queries that share a key-value head are laid side by side as if they were query positions, so
grouped-query attention needs no repeated keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rollmill.engine.embedded.kv import Block, LayerShape, RowPool

ATTENTION_NAME = "rollmill_rows"
PLAN_KEYWORD = "rollmill_plan"


@dataclass(frozen=True, slots=True)
class AttentionStyle:
    """What a layer asks of attention besides queries, keys and values."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionPlan(Protocol):
    """Carries out attention for one forward pass."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        style: AttentionStyle,
    ) -> torch.Tensor:
        """Outputs `[T, heads, value_dim]` for `queries` `[heads, T, dim]` and the new `keys`,
        `values` `[kv_heads, T, dim]`."""
        ...


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; the plan comes through the model's keyword arguments."""
    plan: AttentionPlan = kwargs[PLAN_KEYWORD]
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    style = AttentionStyle(scale, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return plan.attend(layer, query[0], key[0], value[0], style)[None], None


def register() -> None:
    """Make the attention known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, rows_attention)


@dataclass(slots=True)
class ShapeProbe:
    """Plan of the first, throw-away pass: learns each layer's sizes."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        style: AttentionStyle,
    ) -> torch.Tensor:
        """Causal attention over the new tokens alone."""
        self.shapes[layer] = LayerShape(keys.shape[0], keys.shape[2], values.shape[2])
        mask = _causal_mask(0, keys.shape[1], style.window, keys.device)
        return _chunk_attention(queries, keys, values, mask, style)


@dataclass(slots=True)
class DecodePart:
    """One token for each of the first `count` rows of a pool, at `positions`."""

    offset: int
    count: int
    pool: RowPool
    rows: torch.Tensor
    positions: torch.Tensor
    length: int
    """Longest row: positions to attend over."""
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """`[rows, 1, 1, length]`, true where a row may look; None when it may everywhere."""
        if window not in self.masks:
            places = torch.arange(self.length, device=self.positions.device)
            last = self.positions[:, None]
            seen = places[None] <= last
            if window is not None:
                seen &= places[None] > last - window
            self.masks[window] = None if bool(seen.all()) else seen[:, None, None]
        return self.masks[window]


@dataclass(slots=True)
class ChunkPart:
    """Tokens `[start, start + count)` of a prompt, computed into `block`."""

    offset: int
    count: int
    start: int
    block: Block
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """`[count, start + count]`, true where a token may look; None: plain causal."""
        if window not in self.masks:
            self.masks[window] = _causal_mask(self.start, self.count, window, device)
        return self.masks[window]


@dataclass(slots=True)
class StepPlan:
    """Plan of a real step. Layer `i` of the model uses entry `index_of[i]` of the KV store."""

    decode: list[DecodePart]
    chunks: list[ChunkPart]
    index_of: dict[int, int]

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        style: AttentionStyle,
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        index = self.index_of[layer]
        num_heads, num_tokens, _ = queries.shape
        out = queries.new_empty(num_tokens, num_heads, values.shape[-1])
        for part in self.decode:
            span = slice(part.offset, part.offset + part.count)
            pool_keys, pool_values = part.pool.keys[index], part.pool.values[index]
            pool_keys[part.rows, :, part.positions] = keys[:, span].transpose(0, 1)
            pool_values[part.rows, :, part.positions] = values[:, span].transpose(0, 1)
            out[span] = _decode_attention(
                queries[:, span].transpose(0, 1),
                pool_keys[: part.count, :, : part.length],
                pool_values[: part.count, :, : part.length],
                part.mask(style.window),
                style,
            )
        for chunk in self.chunks:
            span = slice(chunk.offset, chunk.offset + chunk.count)
            end = chunk.start + chunk.count
            block_keys, block_values = chunk.block.keys[index], chunk.block.values[index]
            block_keys[:, chunk.start : end] = keys[:, span]
            block_values[:, chunk.start : end] = values[:, span]
            out[span] = _chunk_attention(
                queries[:, span],
                block_keys[:, :end],
                block_values[:, :end],
                chunk.mask(style.window, keys.device),
                style,
            )
        return out


def _causal_mask(
    start: int, count: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """None stands for the plain causal mask of a chunk that starts at 0."""
    if start == 0 and (window is None or window >= count):
        return None
    query_at = torch.arange(start, start + count, device=device)[:, None]
    key_at = torch.arange(start + count, device=device)[None]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    return seen


def _decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    style: AttentionStyle,
) -> torch.Tensor:
    """`[rows, heads, value_dim]` for one query per row: `queries` `[rows, heads, dim]`."""
    num_rows, num_heads, dim = queries.shape
    grouped = queries.reshape(num_rows, keys.shape[1], num_heads // keys.shape[1], dim)
    if style.softcap is None and style.sinks is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=style.scale)
    else:
        sinks = style.sinks
        if sinks is not None:
            sinks = sinks.view(1, keys.shape[1], -1, 1).expand(num_rows, -1, -1, -1)
        out = _plain_attention(grouped, keys, values, mask, style, sinks)
    return out.reshape(num_rows, num_heads, values.shape[-1])


def _chunk_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    style: AttentionStyle,
) -> torch.Tensor:
    """`[tokens, heads, value_dim]` for one prompt's chunk: `queries` `[heads, tokens, dim]`."""
    group = queries.shape[0] // keys.shape[0]
    if group > 1:
        keys = keys.repeat_interleave(group, dim=0)
        values = values.repeat_interleave(group, dim=0)
    if style.softcap is None and style.sinks is None:
        out = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            mask,
            is_causal=mask is None,
            scale=style.scale,
        )[0]
    else:
        if mask is None:
            count = keys.shape[1]
            mask = torch.ones(count, count, dtype=torch.bool, device=keys.device).tril()
        sinks = style.sinks
        if sinks is not None:
            sinks = sinks.view(-1, 1, 1).expand(-1, queries.shape[1], 1)
        out = _plain_attention(queries, keys, values, mask, style, sinks)
    return out.transpose(0, 1)


def _plain_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    style: AttentionStyle,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention step by step, for models with soft-capped scores or attention sinks."""
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * style.scale
    if style.softcap is not None:
        scores = torch.tanh(scores / style.softcap) * style.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(values.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, values)
