"""How many answers a reward grades in a second on one core, and what hostile answers cost.

python bench/rewards.py                    # each type in this process, then through the pool
python bench/rewards.py --hostile 1000 --normal 100000 --workers 1 --timeout 0.25
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmill.config.reward import RewardConfig
from rollmill.rewards.inputs import RewardInput
from rollmill.rewards.judge import Judge
from rollmill.rewards.judging import judge_with
from rollmill.rewards.registry import GraderTable

SECONDS = 2.0
EXPLODING = (
    "9^{9^{9^{9^{9}}}}", "5^{5^{5^{5^{5}}}}", "\\sqrt{9^{9^{9^{9}}}}", "99999999!!",
    "(9^{99999999})!",
    "\\sum_{n=1}^{10^9} \\frac{1}{n^3}",
)  # fmt: skip


def plain_number(k: int) -> RewardInput:
    return RewardInput(response=f"We add them up. So the answer is \\boxed{{{k}}}.", label=str(k))


def latex(k: int) -> RewardInput:
    """Typical answers: fraction, root, polynomial, interval, matrix; new numbers each time."""
    n = k % 97 + 2
    forms = (
        (rf"\frac{{\sqrt{{{n}}}}}{{{k}}}", rf"\frac{{1}}{{{k}}}\sqrt{{{n}}}"),
        (rf"{k}\sqrt{{{n}}} + {n}", rf"{n} + {k}\sqrt{{{n}}}"),
        (rf"x^2 + {k}x + {n}", rf"{n} + {k}x + x^2"),
        (rf"\left[{k}, \infty\right)", rf"[{k},\infty)"),
        (rf"\frac{{{k}\pi}}{{{n}}}", rf"\frac{{{k}}}{{{n}}}\pi"),
        (
            rf"\begin{{pmatrix}}{k}&{n}\\1&0\end{{pmatrix}}",
            rf"\begin{{bmatrix}}{k}&{n}\\1&0\end{{bmatrix}}",
        ),
        (rf"2^{{{n}}} - {k}", rf"-{k} + 2^{{{n}}}"),
    )
    answer, label = forms[k % len(forms)]
    return RewardInput(response=f"Hence $\\boxed{{{answer}}}$.", label=label)


def latex_groups(k: int) -> RewardInput:
    """As training sees it: eight answers to one prompt, so the label is parsed once in eight."""
    item = latex(k // 8 + 1)
    return RewardInput(response=item.response, label=item.label)


PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TESTS = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}
INSTRUCTIONS = {
    "instruction_id_list": ["punctuation:no_comma", "count:word_count_range"],
    "kwargs": [{}, {"min_words": 5, "max_words": 90}],
}
CHOICES = {"choices": ["mitochondria", "nucleus", "ribosome", "cell wall"]}
KINDS: dict[str, tuple[str, Any]] = {
    "math, plain numbers": ("math", plain_number),
    "math, typical LaTeX": ("math", latex),
    "math, LaTeX, 8 answers per label": ("math", latex_groups),
    "deepscaler": (
        "deepscaler",
        lambda k: RewardInput(response=f"<think>well</think>\\boxed{{{k}}}", label=k),
    ),
    "dapo": ("dapo", lambda k: RewardInput(response=f"So it is.\nAnswer: {k}", label=k)),
    "f1": ("f1", lambda k: RewardInput(response=f"in the year {k} in Paris", label=f"{k} Paris")),
    "gpqa": (
        "gpqa",
        lambda k: RewardInput(
            response="It is not A. The answer is B.", label="B", metadata=CHOICES
        ),
    ),
    "ifbench": (
        "ifbench",
        lambda k: RewardInput(response="a few words here and there " * 3, metadata=INSTRUCTIONS),
    ),
    "code (3 tests, sandboxed)": ("code", lambda k: RewardInput(response=PROGRAM, label=TESTS)),
    "random": ("random", lambda k: RewardInput(response="x", index=k)),
}


def rate(kind: str, make: Any) -> float:
    """Answers per second of processor time in this process (wall time for `code`)."""
    grader: Any = GraderTable(RewardConfig(), base_dir=Path(), seed=0).get(kind)
    judge_with(grader, make(10**6))
    clock = time.perf_counter if kind == "code" else time.process_time
    start, done = clock(), 0
    for k in itertools.count(1):
        outcome = judge_with(grader, make(k))
        assert (
            kind == "random"
            or outcome.reward in (1.0, {"score": 1.0, "acc": 1.0})
            or (kind == "f1")
        ), outcome
        done += 1
        if clock() - start > SECONDS:
            break
    return done / (clock() - start)


def worker_memory_mb(judge: Judge) -> float:
    """Resident memory of the workers and their grading processes, in MiB."""
    total = 0
    parents = set(judge.worker_process_ids())
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(
                line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line
            )
        except (OSError, ValueError):
            continue
        if int(status.parent.name) in parents or int(fields["PPid"]) in parents:
            total += int(fields.get("VmRSS", "0 kB").split()[0])
    return total / 1024


class Watch:
    """The longest turn of the event loop, and the most memory that workers held.

    A turn is measured in this thread's processor time too: on a machine that others share, the
    wall time of a turn has their share in it.
    """

    def __init__(self, judge: Judge) -> None:
        self.longest = 0.0
        self.longest_processor = 0.0
        self.memory_mb = 0.0
        self._judge = judge

    async def run(self) -> None:
        last_look = 0.0
        while True:
            before, processor_before = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            late = time.perf_counter() - before - 0.001
            used = time.thread_time() - processor_before
            self.longest = max(self.longest, late)
            self.longest_processor = max(self.longest_processor, min(late, used))
            if before - last_look > 1.0:
                last_look = before
                self.memory_mb = max(
                    self.memory_mb, await asyncio.to_thread(worker_memory_mb, self._judge)
                )


async def through_pool(items: Iterator[RewardInput], config: RewardConfig) -> dict[str, Any]:
    """Judge all items with 1024 in flight, as a rollout would."""
    outcomes: Counter[str] = Counter()
    async with Judge(config, seed=0, base_dir=Path()) as judge:
        watch = Watch(judge)
        watching = asyncio.create_task(watch.run())
        start = time.perf_counter()

        async def consume() -> None:
            for item in items:
                outcome = await judge.judge_input(item)
                outcomes[f"{outcome.kind.value} {outcome.reward}"] += 1

        async with asyncio.TaskGroup() as consumers:
            for k in range(1024):
                consumers.create_task(consume())
                if k % 64 == 0:
                    await asyncio.sleep(0)
        seconds = time.perf_counter() - start
        watching.cancel()
    return {
        "seconds": round(seconds, 2),
        "outcomes": dict(outcomes),
        "longest turn of the event loop (ms)": round(watch.longest * 1e3, 1),
        "of which processor time (ms)": round(watch.longest_processor * 1e3, 1),
        "most memory of all workers (MiB)": round(watch.memory_mb),
    }


def mixed(num_normal: int, num_hostile: int) -> Iterator[RewardInput]:
    """Normal answers (half numbers, half LaTeX) with hostile ones spread among them."""
    every = max(1, num_normal // num_hostile) if num_hostile else num_normal + 1
    for k in range(1, num_normal + 1):
        yield plain_number(k) if k % 2 else latex(k)
        if k % every == 0:
            bomb = EXPLODING[(k // every) % len(EXPLODING)]
            yield RewardInput(response=f"\\boxed{{{bomb} + {k}}}", label=rf"\sqrt{{{k}}}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hostile", type=int, default=0)
    parser.add_argument("--normal", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=0.25)
    options = parser.parse_args()
    config = RewardConfig(type="math", num_workers=options.workers, timeout_s=options.timeout)
    if not options.hostile:
        for name, (kind, make) in KINDS.items():
            print(f"{name:36} {rate(kind, make):10,.0f} answers/s per core", flush=True)
    normal = asyncio.run(through_pool(mixed(options.normal, 0), config))
    print(f"pool, {options.normal} normal answers: {normal}", flush=True)
    if options.hostile:
        both = asyncio.run(through_pool(mixed(options.normal, options.hostile), config))
        print(f"pool, {options.hostile} hostile among them: {both}")
        num_timeouts = sum(n for name, n in both["outcomes"].items() if name.startswith("timeout"))
        allowed = 2 * normal["seconds"] + num_timeouts * options.timeout / options.workers
        print(f"allowed: 2 × normal + deadlines = {allowed:.1f} s; took {both['seconds']} s")
        lost = (
            both["seconds"] - normal["seconds"] - num_timeouts * options.timeout / options.workers
        )
        lost_ms = 1e3 * lost * options.workers / max(1, num_timeouts)
        print(f"lost beside the deadlines: {lost_ms:.1f} ms for each of {num_timeouts} kills")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"this process: {usage.ru_maxrss / 1024:.0f} MiB at most; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
