"""Micro-batches: how token sequences are laid out for one forward pass. Pure numpy.

Three layouts give the same log-probs:

- **padded**: one row per sequence, rows of similar length together, padding on the right.
- **tree**: one row per prefix tree. Sequences that begin alike (a prompt and its n answers, or
  answers that agree for a while) share the positions of their common beginning; a position sees
  its ancestors only, through a 4-D mask, and has the position id of its depth.
- **packed**: rows of several whole sequences end to end, each seeing itself only; next to no
  padding. Attention learns it from boundaries, or else from a 4-D mask.

Invariants: every wanted token is scored exactly once per sequence that wants it, by the position
of its predecessor in that sequence; a micro-batch holds at most `budget` positions, padding
included, unless a single sequence is longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollmill.trainer.packing import pack_rows
from rollmill.trainer.prefix_tree import PrefixTree, split_into_trees

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PACKED_ROW_LENGTH = 512
"""Positions of a packed row, unless a sequence is longer: attention costs their square."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one sample, and which of them to score.

    Attributes:
        tokens: int [L].
        targets: int64 [K], ascending positions (each at least 1) of the tokens whose log-prob is
            wanted.
        family: sequences of one family may share beginnings (the group index).
    """

    tokens: npt.NDArray[np.integer]
    targets: Ints
    family: int = 0

    @property
    def num_inputs(self) -> int:
        """Tokens that have to go through the model: all before the last wanted one."""
        return int(self.targets[-1]) if len(self.targets) else 0


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        members: which sequences, in the order of the outputs.
        input_ids: int64 [B, N].
        position_ids: int64 [B, N].
        make_mask: makes `mask`; None when there is none. A mask costs the square of a row's length,
            so it is made when its forward pass needs it, not while plans are compared.
        rows: int64 [E], position b·N + i whose hidden state scores `target_ids`.
        target_ids: int64 [E].
        outputs: int64 [K], for each wanted token of each member in turn, its entry of [E].
        num_tokens: positions that are not padding.
        boundaries: int64 [S + 1], where the S sequences of the only row (B = 1) begin, and its end,
            when attention is told so instead of by a mask; else None.
    """

    members: tuple[int, ...]
    input_ids: Ints
    position_ids: Ints
    make_mask: Callable[[], Bools] | None
    rows: Ints
    target_ids: Ints
    outputs: Ints
    num_tokens: int
    boundaries: Ints | None = None

    @property
    def num_positions(self) -> int:
        """B·N, padding included."""
        return int(self.input_ids.size)

    @property
    def mask(self) -> Bools | None:
        """bool [B, N] (True is a token) or bool [B, 1, N, N] (True is visible), or None when every
        position is a token and attention is plainly causal."""
        return None if self.make_mask is None else self.make_mask()

    @property
    def attention_cells(self) -> int:
        """Scores per head that attention computes: without a mask, only those it uses."""
        num_rows, width = self.input_ids.shape
        if self.make_mask is not None:
            return int(num_rows * width**2)
        lengths = np.full(num_rows, width) if self.boundaries is None else np.diff(self.boundaries)
        return int((lengths * (lengths + 1) // 2).sum())


def plan_padded(sequences: Sequence[TokenSequence], budget: int) -> list[MicroBatch]:
    """Rows of similar length together, longest first; sequences without targets are left out."""
    order = sorted(
        (number for number, sequence in enumerate(sequences) if len(sequence.targets)),
        key=lambda number: -sequences[number].num_inputs,
    )
    widths = [sequences[number].num_inputs for number in order]
    return [
        _padded([order[i] for i in part], sequences) for part in _fill_rows(widths, budget=budget)
    ]


def plan_trees(sequences: Sequence[TokenSequence], budget: int) -> list[MicroBatch]:
    """A prefix tree per family (more where the budget demands it), similar sizes together."""
    families: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        if len(sequence.targets):
            families.setdefault(sequence.family, []).append(number)
    trees = [
        tree
        for members in families.values()
        for tree in split_into_trees(
            members, [sequences[m].tokens[: sequences[m].num_inputs] for m in members], budget
        )
    ]
    return _forests(trees, sequences, budget)


def plan_packed(
    sequences: Sequence[TokenSequence],
    budget: int,
    *,
    row_length: int = PACKED_ROW_LENGTH,
    needs_mask: bool = True,
) -> list[MicroBatch]:
    """Rows of whole sequences end to end, packed first-fit-decreasing.

    Args:
        sequences: what to score; those without targets are left out.
        budget: most positions per micro-batch.
        row_length: most positions per row; rows grow to the longest sequence where that is more,
            as far as the budget allows.
        needs_mask: False when boundaries will do: one row per micro-batch, as long as the budget.
    """
    members = [number for number, sequence in enumerate(sequences) if len(sequence.targets)]
    inputs = [sequences[m].tokens[: sequences[m].num_inputs] for m in members]
    if not needs_mask:
        return [
            _forest([row], sequences, needs_mask=False)
            for row in pack_rows(members, inputs, budget)
        ]
    longest = max((len(tokens) for tokens in inputs), default=0)
    capacity = min(budget, max(longest, row_length))
    return _forests(pack_rows(members, inputs, capacity), sequences, budget)


def choose_plan(
    sequences: Sequence[TokenSequence],
    budget: int,
    *,
    width: int,
    layer_parameters: int,
    needs_mask: bool = True,
) -> list[MicroBatch]:
    """The cheapest layout, by floating-point operations of one layer.

    Args:
        sequences: what to score.
        budget: most positions per micro-batch.
        width: attention width of a layer (heads × head size).
        layer_parameters: weights of one layer that every position is multiplied by.
        needs_mask: whether packed rows do; see `plan_packed`.
    """

    def cost(plan: list[MicroBatch]) -> int:
        linear = sum(batch.num_positions for batch in plan) * 2 * layer_parameters
        attention = sum(batch.attention_cells for batch in plan) * 4 * width
        return linear + attention

    plans = [
        plan_padded(sequences, budget),
        plan_trees(sequences, budget),
        plan_packed(sequences, budget, needs_mask=needs_mask),
    ]
    return min(plans, key=cost)


def _fill_rows(widths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Cut items (widest first) into batches whose rows × widest row stay within the budget."""
    parts: list[list[int]] = []
    for number in range(len(widths)):
        if parts and (len(parts[-1]) + 1) * widths[parts[-1][0]] <= budget:
            parts[-1].append(number)
        else:
            parts.append([number])
    return parts


def _padded(members: list[int], sequences: Sequence[TokenSequence]) -> MicroBatch:
    lengths = [sequences[member].num_inputs for member in members]
    width = max(lengths)
    input_ids = np.zeros((len(members), width), np.int64)
    rows, target_ids = [], []
    for row, (member, length) in enumerate(zip(members, lengths, strict=True)):
        sequence = sequences[member]
        input_ids[row, :length] = sequence.tokens[:length]
        rows.append(row * width + sequence.targets - 1)
        target_ids.append(sequence.tokens[sequence.targets])
    mask = np.arange(width) < np.array(lengths)[:, None]
    all_rows = np.concatenate(rows)
    return MicroBatch(
        members=tuple(members),
        input_ids=input_ids,
        position_ids=np.broadcast_to(np.arange(width), input_ids.shape).copy(),
        make_mask=None if mask.all() else lambda: mask,
        rows=all_rows,
        target_ids=np.concatenate(target_ids).astype(np.int64),
        outputs=np.arange(len(all_rows)),
        num_tokens=sum(lengths),
    )


def _forests(
    trees: list[PrefixTree], sequences: Sequence[TokenSequence], budget: int
) -> list[MicroBatch]:
    """Micro-batches of the trees, one row each, similar sizes together."""
    trees = sorted(trees, key=lambda tree: -tree.size)
    parts = _fill_rows([tree.size for tree in trees], budget=budget)
    return [_forest([trees[i] for i in part], sequences) for part in parts]


def _forest(
    trees: list[PrefixTree], sequences: Sequence[TokenSequence], *, needs_mask: bool = True
) -> MicroBatch:
    """One row per tree, the largest first; a single packed row when no mask is needed."""
    width = trees[0].size
    shape = (len(trees), width)
    input_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    members: list[int] = []
    rows, target_ids = [], []
    for row, tree in enumerate(trees):
        input_ids[row, : tree.size] = tree.tokens
        position_ids[row, : tree.size] = tree.depths
        for member, path in zip(tree.members, tree.paths, strict=True):
            sequence = sequences[member]
            members.append(member)
            rows.append(row * width + path[sequence.targets - 1])
            target_ids.append(sequence.tokens[sequence.targets])
    edges = np.stack([np.concatenate(rows), np.concatenate(target_ids).astype(np.int64)])
    unique, outputs = np.unique(edges, axis=1, return_inverse=True)
    return MicroBatch(
        members=tuple(members),
        input_ids=input_ids,
        position_ids=position_ids,
        make_mask=functools.partial(_visibility, trees) if needs_mask else None,
        rows=unique[0],
        target_ids=unique[1],
        outputs=outputs.reshape(-1),
        num_tokens=sum(tree.size for tree in trees),
        boundaries=None if needs_mask else _boundaries(trees[0]),
    )


def _visibility(trees: list[PrefixTree]) -> Bools:
    """bool [B, 1, N, N]: what each position sees."""
    width = trees[0].size
    mask = np.zeros((len(trees), 1, width, width), np.bool_)
    mask[:, 0, np.arange(width), np.arange(width)] = True  # padding sees itself, never nothing
    for row, tree in enumerate(trees):
        mask[row, 0, : tree.size, : tree.size] = tree.visibility()
    return mask


def _boundaries(row: PrefixTree) -> Ints:
    """int64 [S + 1] of a packed row."""
    return np.cumsum([0, *(len(path) for path in row.paths)])
