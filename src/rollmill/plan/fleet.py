"""Engines and graders as a discrete-event model: answers go in, judged answers come out. Pure.

An engine decodes all its answers together, so each gets a token per step, and a step takes longer
the more there are. That makes the engine's count of decoding steps a clock of its own: an answer of
n tokens that joins at clock k is done at clock k + n, whatever joins or leaves in between. Only the
speed of that clock changes, so an event costs the logarithm of what is running.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

NEVER = float("inf")
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to be written and judged.

    Attributes:
        group: which prompt.
        tokens: how long it will be.
        prefill_s: engine seconds of its prompt; 0 when another answer's prompt is shared.
    """

    group: int
    tokens: int
    prefill_s: float = 0.0


class Engine:
    """One engine.

    Args:
        line: (a, b): a decoding step of c answers takes a + b·c seconds.
        places: answers decoded together; more wait in line.
    """

    def __init__(self, line: tuple[float, float], places: int) -> None:
        self._line = line
        self._places = places
        self._now = 0.0
        self._steps = 0.0
        self._stall_s = 0.0
        self._running: list[tuple[float, int, Answer]] = []
        self._waiting: deque[Answer] = deque()
        self._number = 0
        self.speed = 1.0
        self.busy_s = 0.0
        self.outstanding = 0

    def add(self, answer: Answer) -> None:
        """Take an answer up, or put it in line."""
        self.outstanding += answer.tokens
        self._waiting.append(answer)
        self._admit()

    def next_finish(self) -> float:
        """When the next answer is done; never, while nothing runs or everything is held."""
        if not self._running or self.speed <= 0:
            return NEVER
        steps = max(0.0, self._running[0][0] - self._steps)
        return self._now + (self._stall_s + steps * self._step_s) / self.speed

    def advance(self, now: float) -> list[Answer]:
        """Work until `now`, which is not after `next_finish`; the answers that are done then."""
        seconds = (now - self._now) * self.speed
        if self._running and self.speed > 0:
            self.busy_s += now - self._now
        self._now = now
        if self._running:
            stalled = min(seconds, self._stall_s)
            self._stall_s -= stalled
            self._steps += (seconds - stalled) / self._step_s
        done = []
        while self._running and self._running[0][0] - self._steps < TINY * max(1.0, self._steps):
            answer = heapq.heappop(self._running)[2]
            self.outstanding -= answer.tokens
            done.append(answer)
        self._admit()
        return done

    def abort(self) -> list[tuple[Answer, int]]:
        """Stop everything; the answers with the tokens that each has."""
        stopped = [
            (answer, max(0, answer.tokens - round(finish - self._steps)))
            for finish, _, answer in self._running
        ]
        stopped += [(answer, 0) for answer in self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._stall_s, self.outstanding = 0.0, 0
        return stopped

    @property
    def _step_s(self) -> float:
        fixed, per_answer = self._line
        return fixed + per_answer * len(self._running)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._places:
            answer = self._waiting.popleft()
            self._stall_s += answer.prefill_s
            self._number += 1
            heapq.heappush(self._running, (self._steps + answer.tokens, self._number, answer))


@dataclass
class Stopped:
    """What an abort left of a group.

    Attributes:
        group: which prompt.
        rest: tokens that each unfinished answer lacks.
        written: tokens that its answers have, finished ones included.
    """

    group: int
    rest: list[int] = field(default_factory=list)
    written: int = 0


class Fleet:
    """Engines behind a limit of requests, and graders behind them.

    Args:
        engines: the engines; a group's answers go to the one with the least to write.
        max_requests: requests in flight over all engines.
        num_graders: workers that judge.
        grade_s: seconds to judge one answer.
    """

    def __init__(
        self, engines: list[Engine], *, max_requests: int, num_graders: int, grade_s: float
    ) -> None:
        self.engines = engines
        self.now = 0.0
        self.num_written = 0
        self._limit = max_requests
        self._in_flight = 0
        self._gate: deque[tuple[int, Answer]] = deque()
        self._grade_s = grade_s
        self._grader_free = [0.0] * num_graders
        self._judged: list[tuple[float, int]] = []
        self._missing: dict[int, int] = {}
        self._done: dict[int, int] = {}

    @property
    def is_busy(self) -> bool:
        """Whether an engine has anything to write."""
        return self._in_flight > 0

    def submit(self, group: int, answers: list[Answer]) -> None:
        """Have a group answered."""
        self._missing[group], self._done[group] = len(answers), 0
        place = min(range(len(self.engines)), key=lambda n: self.engines[n].outstanding)
        for answer in answers:
            self._gate.append((place, answer))
            self._pass_gate()

    def set_speed(self, speed: float) -> None:
        """Engines go so fast from now on; 0 holds them."""
        for engine in self.engines:
            engine.speed = speed

    def next_event(self) -> float:
        """When something happens next; never, when nothing is in flight or all is held."""
        judged = self._judged[0][0] if self._judged else NEVER
        return min([judged, *(engine.next_finish() for engine in self.engines)])

    def advance(self, now: float) -> list[int]:
        """Go on until `now`, which is not after `next_event`; the groups that are finished then."""
        self.now = now
        for engine in self.engines:
            for answer in engine.advance(now):
                self._in_flight -= 1
                self.num_written += answer.tokens
                self._done[answer.group] += answer.tokens
                self._grade(answer)
        self._pass_gate()
        finished = []
        while self._judged and self._judged[0][0] <= now:
            group = heapq.heappop(self._judged)[1]
            self._missing[group] -= 1
            if not self._missing[group]:
                del self._missing[group], self._done[group]
                finished.append(group)
        return finished

    def abort(self) -> list[Stopped]:
        """Stop everything in flight; what is left of each group, in the order of their numbers."""
        left = {group: Stopped(group, written=self._done[group]) for group in self._missing}
        for engine in self.engines:
            for answer, tokens in engine.abort():
                self.num_written += tokens
                left[answer.group].rest.append(answer.tokens - tokens)
                left[answer.group].written += tokens
        for _, answer in self._gate:
            left[answer.group].rest.append(answer.tokens)
        self._gate.clear()
        self._judged.clear()
        self._grader_free = [min(free, self.now) for free in self._grader_free]
        self._missing.clear()
        self._done.clear()
        self._in_flight = 0
        return [left[group] for group in sorted(left)]

    def _pass_gate(self) -> None:
        while self._gate and self._in_flight < self._limit:
            place, answer = self._gate.popleft()
            self._in_flight += 1
            self.engines[place].add(answer)

    def _grade(self, answer: Answer) -> None:
        start = max(self.now, heapq.heappop(self._grader_free))
        heapq.heappush(self._grader_free, start + self._grade_s)
        heapq.heappush(self._judged, (start + self._grade_s, answer.group))
