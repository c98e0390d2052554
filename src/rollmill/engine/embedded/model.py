"""The model and its KV cache: carries out the scheduler's steps.

The model is transformers' own, run with the attention of `attention.py`, so log-probs agree with
a training forward of the same model. `ModelRunner` is used by one thread only.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.engine.embedded import attention, selfcheck
from rollmill.engine.embedded.attention import ChunkPart, DecodePart, StepPlan
from rollmill.engine.embedded.experts import ExpertRecorder, note_experts
from rollmill.engine.embedded.kv import KVStore, LayerShape, kv_bytes_per_token
from rollmill.engine.embedded.loading import context_length_of, load_model, pick_device
from rollmill.engine.embedded.sampling import SamplingParams
from rollmill.engine.embedded.scheduler import Scheduler
from rollmill.engine.embedded.sequence import LogprobRequest, Sequence
from rollmill.engine.embedded.steps import SMALLEST_ROW, Chunk, DroppedRow, Limits, Step
from rollmill.errors import ConfigError, ModelError

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
        self.device = pick_device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.model = load_model(path, self.dtype, self.device, attention.ATTENTION_NAME)
        text_config = self.model.config.get_text_config()
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.context_length = context_length_of(text_config, context_length)
        self._takes_keep = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self.experts = ExpertRecorder(self.model)
        shapes = self._probe()
        self._index_of = {layer: i for i, layer in enumerate(sorted(shapes))}
        self.shapes = [shapes[layer] for layer in sorted(shapes)]
        self.limits = self._limits(config)
        self.kv = self._new_store()
        self._check_itself()

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
        self.experts.start((*sequences, *(chunk.fill.sequence for chunk in step.chunks)))
        logits = self._forward(
            tokens, positions, keep, StepPlan(parts, chunk_parts, self._index_of)
        )
        self._note_experts(sequences, step.chunks)
        prompts = tuple(
            (chunk, first, logits[at : at + chunk.start + chunk.count - first])
            for chunk, first, at in asked
        )
        return StepLogits(sequences, logits[:offset], prompts)

    def _note_experts(self, decoding: tuple[Sequence, ...], chunks: tuple[Chunk, ...]) -> None:
        """Hand the routing of the last forward pass to its sequences, in the order of its row."""
        routed = self.experts.take()
        if routed is None:
            return
        for row, sequence in enumerate(decoding):
            note_experts(sequence, sequence.num_tokens - 1, routed[row : row + 1])
        at = len(decoding)
        for chunk in chunks:
            note_experts(chunk.fill.sequence, chunk.start, routed[at : at + chunk.count])
            at += chunk.count

    def release_kv(self) -> None:
        """Free all KV memory; the scheduler must hold no rows or blocks any more."""
        self.kv.release()
        self._give_back_memory()

    def offload_weights(self) -> None:
        """Move the weights out of GPU memory; on a CPU they stay where they are."""
        if self.device.type != "cpu":
            self.model.to("cpu")
            self._give_back_memory()

    def onload_weights(self) -> None:
        """Undo `offload_weights`."""
        self.model.to(self.device)

    def _give_back_memory(self) -> None:
        """What torch keeps for itself of freed GPU memory is of use to others."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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

    def _check_itself(self) -> None:
        """Prefill, then decode two steps, and compare with the model's own attention.

        Raises:
            ModelError: they disagree.
        """
        count = min(selfcheck.NUM_TOKENS, self.context_length)
        if count < 3:
            return
        tokens = [(7 * i + 3) % self.vocab_size for i in range(count)]
        trial = Sequence("check", tokens[: count - 2], SamplingParams(), LogprobRequest(), seed=0)
        scheduler = Scheduler(self.limits)
        scheduler.add(trial)
        rows: list[torch.Tensor] = []
        while len(rows) < 2:
            step = scheduler.plan()
            self.carry_out(step)
            logits = self.compute(step)
            scheduler.commit(step)
            if logits.sequences:
                rows.append(logits.decode[0].log_softmax(dim=-1))
                trial.append(tokens[len(trial.prompt) + len(trial.output)], 0.0, "")
        self.release_kv()
        reference = selfcheck.reference_logprobs(self.model, tokens[:-1])
        name = type(self.model).__name__
        selfcheck.check_agreement(torch.stack(rows), reference, self.dtype, name)

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
        elif wanted < 2 * SMALLEST_ROW:
            raise ConfigError(
                "the KV cache is too small to be of use",
                where="engine.embedded.max_total_tokens",
                expected=f"at least {2 * SMALLEST_ROW}",
                found=str(wanted),
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
