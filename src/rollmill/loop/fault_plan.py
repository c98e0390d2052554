"""Which fault comes when: a pure function of the configuration and its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollmill.config.faults import FaultKind, FaultsConfig


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        step: the training step in which it comes; at most one per step.
        kind: what breaks.
        after_requests: engine requests into the step; it comes with the next one.
        choice: from 0 up to 1: which of several engines, or where an answer is damaged.
    """

    step: int
    kind: FaultKind
    after_requests: int
    choice: float


def plan_faults(config: FaultsConfig, *, num_steps: int, requests_per_step: int) -> list[Fault]:
    """The whole schedule, in order; empty when faults are off.

    Every run of len(kinds) faults has each kind once, in an order drawn anew. The part of the plan
    up to a step does not depend on how many steps follow.
    """
    if not config.every:
        return []
    draw = random.Random(f"faults/{config.seed}")
    order: list[FaultKind] = []
    plan = []
    for step in range(config.every, num_steps + 1, config.every):
        if not order:
            order = draw.sample(config.kinds, len(config.kinds))
        after = draw.randrange(max(1, requests_per_step))
        plan.append(Fault(step, order.pop(), after, draw.random()))
    return plan
