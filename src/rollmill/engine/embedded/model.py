"""The model and its KV cache: carries out the scheduler's steps.

The model is transformers' own, run with the attention of `attention.py`, so log-probs agree with
a training forward of the same model. `ModelRunner` is used by one thread only.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.engine.embedded import attention
from rollmill.engine.embedded.attention import ChunkPart, DecodePart, StepPlan
from rollmill.engine.embedded.kv import KVStore, LayerShape, kv_bytes_per_token
from rollmill.engine.embedded.scheduler import Chunk, DroppedRow, Limits, Step
from rollmill.engine.embedded.sequence import Sequence
from rollmill.errors import ModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SHARE_OF_MEMORY = 4
"""One of this many parts of the free memory may become KV cache."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits that one step computed, float32 `[rows, vocab]`."""

    sequences: tuple[Sequence, ...]
    """The decoding sequences, in the order of `decode`'s rows."""
    decode: torch.Tensor
    prompts: tuple[tuple[Chunk, int, torch.Tensor], ...]
    """Chunk, first prompt position whose logits were asked for, logits from there on."""


class ModelRunner:
    """A causal LM with rows and blocks of KV cache.

    Args:
        path: model folder.
        config: the engine's settings.
        context_length: overrides the model's own limit.

    Raises:
        ModelError: the folder holds no model that this engine can run.
    """

    def __init__(
        self, path: str, config: EmbeddedEngineConfig, *, context_length: int | None = None
    ) -> None:
        self.device = _device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.model = load_model(path, self.dtype, self.device, attention.ATTENTION_NAME)
        text_config = self.model.config.get_text_config()
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.context_length = _context_length(text_config, context_length)
        self._takes_keep = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        shapes = self._probe()
        self._index_of = {layer: i for i, layer in enumerate(sorted(shapes))}
        self.shapes = [shapes[layer] for layer in sorted(shapes)]
        self.limits = self._limits(config)
        self.kv = self._new_store()

    def carry_out(self, step: Step) -> None:
        """Move rows and blocks as the step says, before its tokens are computed."""
        self.give_up(step.dropped_rows, ())
        for new in step.new_blocks:
            self.kv.new_block(new.block, new.length, new.source, new.num_shared)
        for admission in step.admissions:
            sequence = admission.sequence
            self.kv.admit(sequence, sequence.num_tokens, admission.block)
        self.kv.drop_blocks(step.dropped_blocks)
        for sequence in step.decode:
            self.kv.ensure(sequence, sequence.num_tokens)

    def give_up(self, rows: Iterable[DroppedRow], blocks: Iterable[int]) -> None:
        """Free rows (keeping what is to be saved of them) and then blocks."""
        rows = list(rows)
        for row in rows:
            if row.saved_as is not None:
                self.kv.save_row(row.sequence, row.saved_as, row.length)
        self.kv.drop_rows([row.sequence for row in rows])
        self.kv.drop_blocks(list(blocks))

    def compute(self, step: Step) -> StepLogits:
        """One forward pass over the step's tokens."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences = self._lay_out_decode(tokens, positions)
        parts, offset = [], 0
        for pool in self.kv.pools():
            parts.append(self._decode_part(pool, offset, positions))
            offset += len(pool.owners)
        keep, asked = list(range(offset)), []
        chunk_parts = []
        for chunk in step.chunks:
            end = chunk.start + chunk.count
            chunk_parts.append(
                ChunkPart(len(tokens), chunk.count, chunk.start, self.kv.blocks[chunk.fill.block])
            )
            first = _first_asked(chunk)
            if first is not None:
                at = len(tokens) + first - chunk.start
                asked.append((chunk, first, len(keep)))
                keep.extend(range(at, at + end - first))
            tokens.extend(chunk.fill.tokens[chunk.start : end].tolist())
            positions.extend(range(chunk.start, end))
        logits = self._forward(
            tokens, positions, keep, StepPlan(parts, chunk_parts, self._index_of)
        )
        prompts = tuple(
            (chunk, first, logits[at : at + chunk.start + chunk.count - first])
            for chunk, first, at in asked
        )
        return StepLogits(sequences, logits[:offset], prompts)

    def release_kv(self) -> None:
        """Free all KV memory; the scheduler must hold no rows or blocks any more."""
        self.kv.release()

    def offload_weights(self) -> None:
        """Move the weights out of GPU memory; on a CPU they stay where they are."""
        if self.device.type != "cpu":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def onload_weights(self) -> None:
        """Undo `offload_weights`."""
        self.model.to(self.device)

    def parameter(self, name: str) -> torch.Tensor | None:
        """A weight by its checkpoint name."""
        found: torch.Tensor | None = self.model.state_dict().get(name)
        return found

    def _lay_out_decode(self, tokens: list[int], positions: list[int]) -> tuple[Sequence, ...]:
        sequences: list[Sequence] = []
        for pool in self.kv.pools():
            for owner in pool.owners:
                assert isinstance(owner, Sequence)
                sequences.append(owner)
                tokens.append(owner.last_token)
                positions.append(owner.num_tokens - 1)
        return tuple(sequences)

    def _decode_part(self, pool: Any, offset: int, positions: list[int]) -> DecodePart:
        count = len(pool.owners)
        mine = positions[offset : offset + count]
        return DecodePart(
            offset=offset,
            count=count,
            pool=pool,
            rows=torch.arange(count, device=self.device),
            positions=torch.tensor(mine, device=self.device),
            length=max(mine) + 1,
        )

    def _forward(
        self, tokens: list[int], positions: list[int], keep: list[int], plan: Any
    ) -> torch.Tensor:
        kept = torch.tensor(keep or [0], device=self.device)
        kwargs: dict[str, Any] = {attention.PLAN_KEYWORD: plan}
        if self._takes_keep:
            kwargs["logits_to_keep"] = kept
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                **kwargs,
            )
            logits: torch.Tensor = out.logits[0] if self._takes_keep else out.logits[0][kept]
            return logits.float()[: len(keep)]

    def _probe(self) -> dict[int, LayerShape]:
        """Sizes of every attention layer, learnt by running two tokens."""
        probe = attention.ShapeProbe()
        try:
            self._forward([0, 0], [0, 1], [1], probe)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ModelError(
                f"{type(self.model).__name__} cannot run on the embedded engine: {error!r}",
                expected="a model that supports transformers' attention interface",
                fix="serve this model with SGLang instead",
            ) from error
        if len(probe.shapes) != self.model.config.get_text_config().num_hidden_layers:
            raise ModelError(
                f"{type(self.model).__name__} has layers without a plain KV cache",
                expected="full or sliding-window attention in every layer",
                fix="serve this model with SGLang instead",
            )
        return probe.shapes

    def _limits(self, config: EmbeddedEngineConfig) -> Limits:
        wanted = config.max_total_tokens
        if wanted is None:
            free = _free_memory(self.device) // _SHARE_OF_MEMORY
            fits = free // kv_bytes_per_token(self.shapes, self.dtype)
            # A row and a prompt block of one whole context always find room.
            wanted = max(
                min(fits, 2 * config.max_running_requests * self.context_length),
                2 * self.context_length,
            )
        return Limits(
            max_running=config.max_running_requests,
            max_total_tokens=wanted,
            chunk_tokens=config.chunked_prefill_tokens,
            context_length=self.context_length,
            holds_prefixes=config.hold_finished,
        )

    def _new_store(self) -> KVStore:
        return KVStore(
            self.shapes,
            dtype=self.dtype,
            device=self.device,
            row_size=self.limits.row_size,
            max_total_tokens=self.limits.max_total_tokens,
        )


def load_model(path: str, dtype: torch.dtype, device: torch.device, attention_name: str) -> Any:
    """A model in evaluation mode, without gradients.

    Raises:
        ModelError: no such folder, no causal LM in it, or one with unsupported layers.
    """
    if not Path(path).is_dir():
        raise ModelError("the model folder does not exist", where=path)
    attention.register()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _check_layers(config.get_text_config(), path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention_name,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"the model cannot be loaded: {error}", where=path) from error
    absent = sorted(report["missing_keys"])
    if absent:  # transformers would go on with random numbers in their place
        raise ModelError(f"weights are missing from the model: {absent[:3]}", where=path)
    model.to(device).eval().requires_grad_(False)
    return model


def _check_layers(config: Any, path: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or [])
    odd = sorted(kinds - _LAYER_TYPES)
    if getattr(config, "num_kv_shared_layers", 0):
        odd.append("layers that share keys and values")
    if odd:
        raise ModelError(
            f"the model has layers that the embedded engine cannot run: {', '.join(odd)}",
            where=path,
            expected="full or sliding-window attention in every layer",
            fix="serve this model with SGLang instead",
        )


def _context_length(config: Any, wanted: int | None) -> int:
    own = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is None:
        return own or 2048
    if own and wanted > own:
        raise ModelError(
            "the context length is more than the model can do",
            where="model.context_length",
            expected=f"at most {own}",
            found=str(wanted),
        )
    return wanted


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "there is no CUDA device", where="engine.embedded.device", fix="set device: cpu"
        )
    return torch.device(name)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _first_asked(chunk: Chunk) -> int | None:
    """First position in the chunk whose logits give a wanted prompt log-prob."""
    sequence = chunk.fill.sequence
    if not sequence.logprobs.wants_input or sequence.has_input_logprobs:
        return None
    # The logits at position i speak about token i + 1, and the last prompt token is the end.
    first = max(chunk.start, sequence.logprobs.start_len)
    last = min(chunk.start + chunk.count, len(sequence.prompt) - 1)
    return first if first < last else None
