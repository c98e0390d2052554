"""A run on the clock only: the same rules as the real loop, with lengths instead of answers. Pure.

Which groups make a batch and which may be admitted is decided by the run's own state machines
(`rollout.collector`, `rollout.staleness`), so a plan cannot disagree with the run about them.
Everything is computed from a seed: the same plan gives the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollmill.filters import Verdict
from rollmill.plan.assumptions import Assumptions
from rollmill.plan.fleet import NEVER, Answer, Engine, Fleet
from rollmill.plan.schedule import Schedule, StepTimes
from rollmill.rollout.collector import CollectLimits, Collector
from rollmill.rollout.staleness import StalenessGate
from rollmill.sample import Group


def simulate(
    schedule: Schedule, assumptions: Assumptions, *, num_steps: int, seed: int = 0
) -> list[StepTimes]:
    """The steps of a run that starts with idle engines.

    Args:
        schedule: what is run.
        assumptions: how fast things are.
        num_steps: how many steps.
        seed: of the answers' lengths.
    """
    kind = Synchronous if schedule.max_staleness is None else Asynchronous
    steps = kind(schedule, assumptions, seed).steps()
    return [next(steps) for _ in range(num_steps)]


class SimulatedRun:
    """What both kinds of run share: groups with lengths, and the clock of each step."""

    def __init__(self, schedule: Schedule, assumptions: Assumptions, seed: int) -> None:
        self.schedule = schedule
        self.assumptions = assumptions
        line = assumptions.decode_line(schedule.places)
        self.fleet = Fleet(
            [Engine(line, schedule.places) for _ in range(schedule.num_engines)],
            max_requests=schedule.max_requests,
            num_graders=schedule.num_graders,
            grade_s=assumptions.grade_s,
        )
        self.tokens: dict[int, int] = {}
        self._rng = np.random.default_rng(seed)
        self._num_groups = 0
        self._credit = 0.0

    def new_group(self) -> tuple[int, list[int]]:
        """The next group and its answers' lengths."""
        schedule, number = self.schedule, self._num_groups
        self._num_groups += 1
        lengths = self.assumptions.group_lengths(
            self._rng, schedule.num_answers, schedule.max_new_tokens
        )
        self.tokens[number] = sum(lengths)
        return number, lengths

    def submit(self, group: int, lengths: list[int]) -> None:
        """Have a group answered; the prompt is computed once."""
        prompt_s = self.assumptions.prompt_tokens / self.assumptions.prefill_tokens_per_second
        self.fleet.submit(
            group,
            [Answer(group, n, prompt_s if place == 0 else 0.0) for place, n in enumerate(lengths)],
        )

    def verdict(self) -> Verdict:
        """The filter's: as many are kept as was assumed, evenly."""
        self._credit += self.assumptions.accepted_share
        if self._credit >= 1.0 - 1e-9:
            self._credit -= 1.0
            return Verdict(True)
        return Verdict(False, "filter")

    def marks(self) -> tuple[float, float, int]:
        """Clock, busy seconds of the engines and tokens so far: to take differences of."""
        busy = sum(engine.busy_s for engine in self.fleet.engines)
        return self.fleet.now, busy, self.fleet.num_written

    def idle_share(self, busy_s: float, seconds: float) -> float:
        """Share of the engines' time in which they had nothing to write."""
        whole = seconds * len(self.fleet.engines)
        return min(1.0, max(0.0, 1.0 - busy_s / whole)) if whole else 0.0


class Synchronous(SimulatedRun):
    """Rollout, training, sync, one after the other."""

    def __init__(self, schedule: Schedule, assumptions: Assumptions, seed: int) -> None:
        super().__init__(schedule, assumptions, seed)
        self._unfinished: list[tuple[int, list[int]]] = []
        self._ready: list[Group] = []
        self._born: dict[int, int] = {}

    def steps(self) -> Iterator[StepTimes]:
        """The steps, without end."""
        version = 0
        while True:
            start, busy, written = self.marks()
            groups = self._collect(version)
            rollout_s = self.fleet.now - start
            tokens = sum(self.tokens.pop(group.group_index) for group in groups)
            ages = [version - self._born.pop(group.group_index) for group in groups]
            train_s = self.assumptions.train_seconds(tokens)
            sync_s = self.assumptions.sync_s
            now = self.fleet.now + train_s + sync_s + self.assumptions.other_s
            self.fleet.advance(now)
            _, busy_now, written_now = self.marks()
            yield StepTimes(
                seconds=now - start,
                rollout_s=rollout_s,
                train_s=train_s,
                sync_s=sync_s,
                engines_idle=self.idle_share(busy_now - busy, now - start),
                tokens=tokens,
                written=written_now - written,
                staleness=float(np.mean(ages)),
                max_staleness=max(ages),
            )
            version += 1

    def _collect(self, version: int) -> list[Group]:
        schedule = self.schedule
        target = schedule.submit_size if schedule.is_ranked else schedule.batch_size
        collector = Collector(_limits(target, schedule.submit_size))
        ready, self._ready = self._ready, []
        for group in ready:
            collector.offer_ready(group)
        while not collector.is_done:
            for _ in range(count := collector.num_to_submit()):
                self._submit_next(version)
            collector.submitted(count)
            for number in self.fleet.advance(self.fleet.next_event()):
                collector.finished(Group(number, []), self.verdict())
        self._stop(version)
        self._ready = list(collector.surplus)
        for group, _ in collector.rejected:
            del self.tokens[group.group_index], self._born[group.group_index]
        return self._cut(collector.accepted)

    def _submit_next(self, version: int) -> None:
        group, lengths = self._unfinished.pop(0) if self._unfinished else self.new_group()
        self._born.setdefault(group, version)
        self.submit(group, lengths)

    def _stop(self, version: int) -> None:
        """Abort what the batch did not wait for; keep it for the next step when so configured."""
        for stopped in self.fleet.abort():
            if self.schedule.is_partial:
                self._unfinished.append((stopped.group, stopped.rest or [1]))
            else:
                del self.tokens[stopped.group], self._born[stopped.group]

    def _cut(self, accepted: list[Group]) -> list[Group]:
        kept = accepted[: self.schedule.batch_size]
        for group in accepted[self.schedule.batch_size :]:
            del self.tokens[group.group_index], self._born[group.group_index]
        return kept


class Asynchronous(SimulatedRun):
    """Rollouts that go on while the trainer trains, within the staleness bound."""

    def __init__(self, schedule: Schedule, assumptions: Assumptions, seed: int) -> None:
        super().__init__(schedule, assumptions, seed)
        self._bound = schedule.max_staleness or 0
        self._gate = StalenessGate(batch_size=schedule.batch_size, max_staleness=self._bound)
        self._born: dict[int, int] = {}

    def steps(self) -> Iterator[StepTimes]:
        """The steps, without end."""
        version = 0
        while True:
            start, busy, written = self.marks()
            groups = self._wait_for_batch()
            rollout_s = self.fleet.now - start
            tokens = sum(self.tokens.pop(group) for group in groups)
            ages = [version - self._born.pop(group) for group in groups]
            trained = self.fleet.now
            self._train(self.assumptions.train_seconds(tokens))
            train_s = self.fleet.now - trained
            self._sync()
            version += 1
            self._gate.trained(version)
            self._work_until(self.fleet.now + self.assumptions.other_s)
            now, busy_now, written_now = self.marks()
            yield StepTimes(
                seconds=now - start,
                rollout_s=rollout_s,
                train_s=train_s,
                sync_s=self.assumptions.sync_s,
                engines_idle=self.idle_share(busy_now - busy, now - start),
                tokens=tokens,
                written=written_now - written,
                staleness=float(np.mean(ages)),
                max_staleness=max(ages),
            )

    def _wait_for_batch(self) -> list[int]:
        self._admit()
        while (batch := self._gate.take_batch()) is None:
            self._go_on(self.fleet.next_event())
        return batch

    def _train(self, seconds: float) -> None:
        """Train for `seconds` of the trainer's own time, which passes slower while engines work."""
        slow = self.assumptions.contention
        left = seconds
        while left > 1e-12:
            self._admit()
            pace = 1.0 / slow if self.fleet.is_busy else 1.0
            self.fleet.set_speed(1.0 / slow)
            start = self.fleet.now
            self._go_on(min(self.fleet.next_event(), start + left / pace))
            left -= (self.fleet.now - start) * pace
        self.fleet.set_speed(1.0)

    def _sync(self) -> None:
        """Engines hold while they take the new weights."""
        self.fleet.set_speed(0.0)
        self._work_until(self.fleet.now + self.assumptions.sync_s)
        self.fleet.set_speed(1.0)

    def _work_until(self, end: float) -> None:
        self._admit()
        while self.fleet.now < end:
            self._go_on(min(self.fleet.next_event(), end))

    def _go_on(self, now: float) -> None:
        """Go to `now`; finished groups are kept or dropped, and new ones admitted."""
        if now == NEVER:
            raise RuntimeError("nothing is in flight and no batch is full")
        for group in self.fleet.advance(now):
            if self.verdict().keep:
                self._gate.finish(group)
            else:
                self._gate.drop(group)
                del self.tokens[group], self._born[group]
        self._admit()

    def _admit(self) -> None:
        for _ in range(self._gate.num_to_admit()):
            group, lengths = self.new_group()
            self._gate.admit(group)
            self._born[group] = self._gate.version
            self.submit(group, lengths)


def _limits(target: int, submit_size: int) -> CollectLimits:
    return CollectLimits(
        target=target,
        submit_size=submit_size,
        max_consecutive_rejections=1 << 40,
        max_refills=1 << 40,
        when_short="error",
        max_failure_rate=1.0,
        filter_name="filter",
    )
