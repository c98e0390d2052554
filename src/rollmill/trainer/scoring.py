"""Planning and scoring token sequences on one rank or many.

Invariant: every rank gets the same number of forward passes (a rank without work runs idle ones),
and each sequence is in exactly one real micro-batch of exactly one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from rollmill.trainer.layout import MicroBatch, TokenSequence
from rollmill.trainer.policy import Policy, idle_batch
from rollmill.trainer.ranks import Ranks, spread


def joint_plan(
    policy: Policy, sequences: Sequence[TokenSequence], budget: int, ranks: Ranks
) -> list[MicroBatch]:
    """This rank's micro-batches; `members` are numbers of `sequences`, none in an idle batch."""
    if ranks.size == 1:
        return policy.plan(sequences, budget)
    units = _units(sequences, ranks.size)
    costs = [sum(sequences[number].num_inputs for number in unit) for unit in units]
    share = [number for unit in spread(costs, ranks.size)[ranks.rank] for number in units[unit]]
    plan = [
        replace(batch, members=tuple(share[member] for member in batch.members))
        for batch in policy.plan([sequences[number] for number in share], budget)
    ]
    idle = replace(idle_batch(), members=())
    return plan + [idle] * (ranks.max(len(plan)) - len(plan))


def score_sequences(
    policy: Policy,
    sequences: Sequence[TokenSequence],
    *,
    budget: int,
    temperature: float,
    ranks: Ranks,
) -> list[npt.NDArray[np.float32]]:
    """Log-probs of each sequence's wanted tokens, without gradient; the same on every rank."""
    counts = [len(sequence.targets) for sequence in sequences]
    starts = np.cumsum([0, *counts])
    flat = np.zeros(starts[-1], np.float32)
    with torch.no_grad():
        for batch in joint_plan(policy, sequences, budget, ranks):
            scores, _ = policy.log_probs(batch, temperature=temperature)
            if batch.members:
                indices = [np.arange(starts[m], starts[m + 1]) for m in batch.members]
                flat[np.concatenate(indices)] = scores.float().cpu().numpy()
    total = ranks.sum(flat)
    return [total[starts[n] : starts[n + 1]] for n in range(len(sequences))]


def _units(sequences: Sequence[TokenSequence], num_ranks: int) -> list[list[int]]:
    """What goes to one rank together: families (they share beginnings), if there are enough."""
    families: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        families.setdefault(sequence.family, []).append(number)
    if len(families) >= 2 * num_ranks:
        return list(families.values())
    return [[number] for number in range(len(sequences))]
