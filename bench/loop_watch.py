"""Watches an asyncio event loop: how long each turn takes, and which callbacks take it.

A turn is what the loop does between two looks at its sockets; nothing else can run meanwhile. Turns
are measured by the clock (which also shows what else the machine does) and in CPU time of the
loop's thread. A callback is named after its function, or the coroutine whose task it steps.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NUM_CAUSES = 3
Seconds = defaultdict[str, float]


@dataclass
class Turn:
    """One turn: seconds by the clock, seconds of CPU, and these by cause."""

    clock: float = 0.0
    cpu: float = 0.0
    causes: Seconds = field(default_factory=lambda: defaultdict(float))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in most_of(self.causes))
        return f"{self.cpu * 1e3:5.1f} ms CPU, {self.clock * 1e3:5.1f} ms by the clock ({parts})"


@dataclass
class Phase:
    """The turns of one phase of the work."""

    num_turns: int = 0
    seconds: float = 0.0
    longest_by_cpu: Turn = field(default_factory=Turn)
    longest_by_clock: Turn = field(default_factory=Turn)
    longest_callback: Seconds = field(default_factory=lambda: defaultdict(float))

    def add(self, turn: Turn) -> None:
        self.num_turns += 1
        self.seconds += turn.cpu
        self.longest_by_cpu = max(self.longest_by_cpu, turn, key=lambda t: t.cpu)
        self.longest_by_clock = max(self.longest_by_clock, turn, key=lambda t: t.clock)


class LoopWatch:
    """Watches one loop from `attach` on.

    Args:
        phase: names the phase that the work is in; asked at the end of every turn. Turns of the
            phase "" are left out.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self.phases: dict[str, Phase] = {}
        self.longest_calls: dict[str, tuple[float, float]] = {}
        self._phase = phase
        self._turn = Turn()
        self._started = (0.0, 0.0)
        self._longest: Seconds = defaultdict(float)
        self._gc_started = 0.0
        self._gc_in_callback = 0.0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin. There is no end: a watch is for one process."""
        private: Any = loop
        selector, handles = private._selector, private_handles()
        select, run = selector.select, handles._run

        def watched_select(timeout: float | None = None) -> Any:
            self._end_turn()
            events = select(timeout)
            self._started = (time.monotonic(), time.thread_time())
            return events

        def watched_run(handle: asyncio.Handle) -> None:
            name = name_of(handle)
            self._gc_in_callback = 0.0
            started = time.thread_time()
            run(handle)
            seconds = time.thread_time() - started - self._gc_in_callback
            self._turn.causes[name] += seconds
            self._longest[name] = max(self._longest[name], seconds)

        selector.select = watched_select
        handles._run = watched_run
        gc.callbacks.append(self._collected)
        self._started = (time.monotonic(), time.thread_time())

    def report(self) -> None:
        """Print every phase: its longest turns, and the callbacks that took longest at once."""
        for name, phase in self.phases.items():
            print(f"{name}: {phase.num_turns} turns, {phase.seconds:.2f} s of CPU")
            print(f"  longest turn by CPU    {phase.longest_by_cpu}")
            print(f"  longest by the clock   {phase.longest_by_clock}")
            for cause, seconds in most_of(phase.longest_callback):
                print(f"  longest callback       {seconds * 1e3:5.1f} ms CPU  {cause}")
        for name, (cpu, clock) in self.longest_calls.items():
            print(f"longest {name}: {cpu * 1e3:.1f} ms CPU, {clock * 1e3:.1f} ms by the clock")

    def time_calls(self, owner: Any, name: str, label: str) -> None:
        """Also measure each call of a function that is called in the midst of callbacks."""
        function: Callable[..., Any] = getattr(owner, name)
        self.longest_calls[label] = (0.0, 0.0)

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            clock, cpu = time.monotonic(), time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                spent = time.thread_time() - cpu, time.monotonic() - clock
                longest = self.longest_calls[label]
                self.longest_calls[label] = max(longest[0], spent[0]), max(longest[1], spent[1])

        setattr(owner, name, timed)

    def _end_turn(self) -> None:
        clock, cpu = self._started
        self._turn.clock, self._turn.cpu = time.monotonic() - clock, time.thread_time() - cpu
        if name := self._phase():
            phase = self.phases.setdefault(name, Phase())
            phase.add(self._turn)
            for cause, seconds in self._longest.items():
                phase.longest_callback[cause] = max(phase.longest_callback[cause], seconds)
        self._turn, self._longest = Turn(), defaultdict(float)

    def _collected(self, moment: str, info: dict[str, int]) -> None:
        now = time.thread_time()
        if moment == "start":
            self._gc_started = now
            return
        seconds = now - self._gc_started
        self._gc_in_callback += seconds
        name = f"garbage collection, generation {info['generation']}"
        self._turn.causes[name] += seconds
        self._longest[name] = max(self._longest[name], seconds)


def private_handles() -> Any:
    """The class of what a loop runs, whose private parts are looked at."""
    return asyncio.Handle


def most_of(seconds: Seconds) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])[:NUM_CAUSES]


def name_of(handle: asyncio.Handle) -> str:
    """What a handle runs: a function, or the coroutine of the task that it steps."""
    private: Any = handle
    callback = private._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner.get_name()))
    function = getattr(callback, "func", callback)
    return str(getattr(function, "__qualname__", type(function).__name__))
