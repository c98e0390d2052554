"""What the engine computes next: a pure state machine, without torch and without I/O.

A sequence waits, has its context (all tokens but the last) prefilled in chunks into a block of
its own, and then decodes one token per step in a row of the batch. A finished block stays as a
held prefix, so a group's shared prompt is computed once: the other members wait for the first
one's block and copy it.

Invariants: a live sequence is in exactly one of `waiting`, `fills`, `running`; the tokens of KV
that are reserved never exceed `max_total_tokens`, as long as `check_fits` passed for every
sequence; when growth runs out of room the youngest sequence is retracted, never the oldest, so
the oldest always finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from rollmill.engine.embedded.prefixes import PrefixIndex, Tokens, common_prefix
from rollmill.engine.embedded.sequence import Sequence
from rollmill.engine.embedded.steps import (
    Admission,
    Chunk,
    DroppedRow,
    Fill,
    Limits,
    NewBlock,
    Step,
)

MIN_SHARED = 16
"""Shared tokens that are worth waiting for another prompt's prefill."""


class _Blocked(Enum):
    """Why a waiting sequence cannot start now."""

    NO_ROOM = auto()
    BY_SHARED_PREFILL = auto()


@dataclass(slots=True)
class Scheduler:
    """Queues and room; see the module's text for the rules."""

    limits: Limits
    waiting: deque[Sequence] = field(default_factory=deque)
    fills: list[Fill] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    _awaited: dict[Sequence, int] = field(default_factory=dict)
    """Which block's prefill a waiting sequence waits for: it is not looked at before that ends,
    since thousands may wait for a long one."""
    _dropped_rows: list[DroppedRow] = field(default_factory=list)
    _dropped_blocks: list[int] = field(default_factory=list)
    _next_block: int = 0
    _next_arrival: int = 0

    # What happened -----------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.arrival = self._next_arrival
        self._next_arrival += 1
        self.waiting.append(sequence)

    def remove(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take every matching sequence out, wherever it is; they are returned."""
        removed = [s for s in self.waiting if matches(s)]
        self.waiting = deque(s for s in self.waiting if not matches(s))
        for fill in [f for f in self.fills if matches(f.sequence)]:
            removed.append(fill.sequence)
            self._cancel(fill)
        for sequence in [s for s in self.running if matches(s)]:
            removed.append(sequence)
            self._drop_row(sequence)
        for sequence in removed:
            self._awaited.pop(sequence, None)
        return removed

    def retire(self, sequence: Sequence) -> None:
        """Take a decoding sequence that is done out of the batch.

        Its tokens stay held, so that the next turn of a conversation goes on from there.
        """
        self.running.remove(sequence)
        context = np.asarray(sequence.context(), dtype=np.int32)
        block = self._new_block_number()
        may_save = self.limits.holds_prefixes and not sequence.has_stale_kv
        is_saved = may_save and self.prefixes.add(block, context)
        saved_as = block if is_saved else None
        self._dropped_rows.append(DroppedRow(sequence, saved_as, len(context)))

    def retract_all(self) -> None:
        """Send all started work back to the queue; its KV is given up, its tokens stay."""
        started = [*self.running, *(fill.sequence for fill in self.fills)]
        for fill in list(self.fills):
            self._cancel(fill)
        for sequence in list(self.running):
            self._drop_row(sequence)
            sequence.num_retractions += 1
        self._requeue(started)

    def forget_prefixes(self) -> None:
        """Drop held prefixes and restart prefills: the weights that computed them are gone.

        Running sequences go on with what they have, but nobody else may use it.
        """
        for sequence in self.running:
            sequence.has_stale_kv = True
        self._dropped_blocks.extend(self.prefixes.clear())
        unfinished = [fill.sequence for fill in self.fills]
        for fill in list(self.fills):
            self._cancel(fill)
        self._requeue(unfinished)

    def commit(self, step: Step) -> list[Sequence]:
        """Note that `step` was computed; sequences that are done with their prompt alone."""
        finished: list[Sequence] = []
        ready: list[Sequence] = []
        for chunk in step.chunks:
            chunk.fill.done += chunk.count
        for fill in [f for f in self.fills if f.is_complete]:
            self.fills.remove(fill)
            fill.sequence.has_input_logprobs = True
            if not self.prefixes.add(fill.block, fill.tokens):
                self._dropped_blocks.append(fill.block)
            wants_tokens = fill.sequence.params.max_new_tokens > 0
            (ready if wants_tokens else finished).append(fill.sequence)
        self._requeue(ready)
        return finished

    # What to do --------------------------------------------------------------------------

    def plan(self) -> Step:
        """The next step. The caller carries it out and then calls `commit`."""
        self._make_room()
        new_blocks, admissions, finished = self._admit()
        chunks = self._next_chunks()
        # A block dropped here may still be the source of a copy in this very step: the step's
        # order (copies first, then drops) keeps that right.
        rows, blocks = self.take_dropped()
        return Step(
            dropped_rows=tuple(rows),
            new_blocks=tuple(new_blocks),
            admissions=tuple(admissions),
            dropped_blocks=tuple(blocks),
            decode=tuple(self.running),
            chunks=tuple(chunks),
            finished=tuple(finished),
        )

    def take_dropped(self) -> tuple[list[DroppedRow], list[int]]:
        """Rows and blocks given up since the last call, to be freed now."""
        dropped = self._dropped_rows, self._dropped_blocks
        self._dropped_rows, self._dropped_blocks = [], []
        return dropped

    def check_fits(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether a sequence of that size can ever run alone in the KV cache."""
        total = prompt_tokens + max_new_tokens
        return self.limits.row_size(total) + total <= self.limits.max_total_tokens

    @property
    def num_unfinished(self) -> int:
        """Sequences that are waiting, prefilling or decoding."""
        return len(self.waiting) + len(self.fills) + len(self.running)

    @property
    def tokens_reserved(self) -> int:
        """Tokens of KV taken by rows, prefills and held prefixes."""
        rows = sum(self.limits.row_size(s.num_tokens) for s in self.running)
        return rows + sum(len(f.tokens) for f in self.fills) + self.prefixes.num_tokens

    # Helpers -----------------------------------------------------------------------------

    def _make_room(self) -> None:
        while self.tokens_reserved > self.limits.max_total_tokens:
            oldest = self.prefixes.pop_oldest()
            if oldest is not None:
                self._dropped_blocks.append(oldest)
            elif self.fills:
                fill = self.fills[-1]
                self._cancel(fill)
                self._requeue([fill.sequence])
            else:
                self._retract(max(self.running, key=lambda s: s.arrival))

    def _admit(self) -> tuple[list[NewBlock], list[Admission], list[Sequence]]:
        new_blocks: list[NewBlock] = []
        admissions: list[Admission] = []
        finished: list[Sequence] = []
        passed_over: list[Sequence] = []
        blocks = {fill.block for fill in self.fills}
        self._awaited = {s: block for s, block in self._awaited.items() if block in blocks}
        while self.waiting:
            sequence = self.waiting.popleft()
            if sequence in self._awaited:
                passed_over.append(sequence)
                continue
            if _needs_no_model(sequence):
                finished.append(sequence)
                continue
            started = self._try_start(sequence)
            if isinstance(started, NewBlock):
                new_blocks.append(started)
            elif isinstance(started, Admission):
                admissions.append(started)
            else:
                passed_over.append(sequence)
                if started is _Blocked.NO_ROOM:
                    break
        self.waiting.extendleft(reversed(passed_over))
        return new_blocks, admissions, finished

    def _try_start(self, sequence: Sequence) -> NewBlock | Admission | _Blocked:
        if len(self.running) + len(self.fills) >= self.limits.max_running:
            return _Blocked.NO_ROOM
        context = np.asarray(sequence.context(), dtype=np.int32)
        limit = sequence.reusable_prefix()
        source, shared = self.prefixes.longest(context, limit)
        is_held = shared == len(context) and sequence.params.max_new_tokens > 0
        awaited = None if is_held else self._worth_waiting_for(context, limit, shared)
        if awaited is not None:
            self._awaited[sequence] = awaited.block
            return _Blocked.BY_SHARED_PREFILL
        if not self._reserve(sequence, 0 if is_held else len(context), keep=source):
            # Alone, it must be able to start: then even the prefix it would use has to go.
            if self.running or self.fills or source is None:
                return _Blocked.NO_ROOM
            source, shared, is_held = None, 0, False
            if not self._reserve(sequence, len(context), keep=None):
                return _Blocked.NO_ROOM
        if sequence.cached_tokens is None:
            sequence.cached_tokens = shared
        sequence.has_stale_kv = False
        if is_held:
            self.running.append(sequence)
            return Admission(sequence, source)
        return self._start_fill(sequence, context, source, shared)

    def _start_fill(
        self, sequence: Sequence, context: Tokens, source: int | None, shared: int
    ) -> NewBlock:
        if not sequence.has_input_logprobs:
            sequence.input_logprobs = type(sequence.input_logprobs)()
        block = self._new_block_number()
        # At least one token is computed even when all are held: prompt log-probs need it.
        shared = min(shared, len(context) - 1)
        self.fills.append(Fill(sequence, block, context, done=shared))
        return NewBlock(block, len(context), source if shared else None, shared)

    def _worth_waiting_for(self, context: Tokens, limit: int, shared: int) -> Fill | None:
        missing = len(context) - shared
        enough = min(missing, max(MIN_SHARED, (missing + 1) // 2))
        for fill in self.fills:
            if common_prefix(fill.tokens, context[:limit]) - shared >= enough:
                return fill
        return None

    def _reserve(self, sequence: Sequence, block_tokens: int, keep: int | None) -> bool:
        """Evict held prefixes until the sequence's row and block fit; False when they cannot."""
        needed = self.limits.row_size(sequence.num_tokens) + block_tokens
        rows_to_come = sum(self.limits.row_size(f.sequence.num_tokens) for f in self.fills)
        while self.tokens_reserved + rows_to_come + needed > self.limits.max_total_tokens:
            oldest = self.prefixes.pop_oldest(keep=keep)
            if oldest is None:
                return False
            self._dropped_blocks.append(oldest)
        return True

    def _next_chunks(self) -> list[Chunk]:
        budget = self.limits.chunk_tokens
        chunks = []
        for fill in self.fills:
            count = min(budget, len(fill.tokens) - fill.done)
            if count <= 0:
                break
            chunks.append(Chunk(fill, fill.done, count))
            budget -= count
        return chunks

    def _retract(self, sequence: Sequence) -> None:
        sequence.num_retractions += 1
        self._drop_row(sequence)
        self._requeue([sequence])

    def _drop_row(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._dropped_rows.append(DroppedRow(sequence))

    def _new_block_number(self) -> int:
        self._next_block += 1
        return self._next_block

    def _cancel(self, fill: Fill) -> None:
        self.fills.remove(fill)
        self._dropped_blocks.append(fill.block)

    def _requeue(self, sequences: list[Sequence]) -> None:
        """Put started sequences back in front, oldest first."""
        for sequence in sorted(sequences, key=lambda s: s.arrival, reverse=True):
            self.waiting.appendleft(sequence)


def _needs_no_model(sequence: Sequence) -> bool:
    """Whether it wants no tokens, and no log-probs that need computing."""
    if sequence.params.max_new_tokens > 0:
        return False
    return not sequence.logprobs.wants_input or len(sequence.prompt) == 1
