"""What one sample costs the driver: 512 prompt tokens, 8,192 response tokens with log-probs.

    python bench/rollout_overhead.py [--samples 1024] [--tokens 8192] [--in-flight 256]
    python bench/rollout_overhead.py --stream-interval 64 [--cumulative]    answers in pieces
    python bench/rollout_overhead.py --burst 4096 [--tokens 8192]    is the event loop free?

A stub engine in a process of its own answers every request with the same bytes, so that nearly all
time is the driver's. The driver is the real one: engine pool and client, parsing and its checks,
segments, group, collector, ledger, metrics. Reported is CPU time per sample (the wall clock also
shows the stub and whatever else the machine does), where it goes, and how late the event loop
was at most.

With `--stream-interval` answers come in pieces of so many tokens: each with what is new, as the
embedded engine sends them, or with everything so far, as SGLang does without its flag.

A burst has that many requests in flight before the first is answered. It is run twice: all answers
come at once; and one group is answered, the batch is full, and all others are aborted, whose
answers then come at once. For each phase the longest turns are reported, and what took them.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from loop_watch import LoopWatch, Seconds

PROMPT_TOKENS = 512
GROUP_SIZE = 8
HEARTBEAT_S = 0.001


def answer_bytes(num_tokens: int, finish: dict[str, Any] | None) -> bytes:
    draw = random.Random(0)
    ids = [draw.randrange(3, 150_000) for _ in range(num_tokens)]
    meta = {
        "id": "x",
        "finish_reason": finish,
        "output_token_logprobs": [[-draw.expovariate(3.0), token, None] for token in ids],
        "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}],
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": 0,
    }
    text = " ".join("word" for _ in range(num_tokens // 2))
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


def pieces_of(num_tokens: int, interval: int, *, is_cumulative: bool) -> list[bytes]:
    """The server-sent events of one streamed answer."""
    whole = orjson.loads(answer_bytes(num_tokens, {"type": "length", "length": num_tokens}))
    meta = whole["meta_info"]
    events, start = [], 0
    for end in [*range(1, num_tokens, interval), num_tokens]:
        begin = 0 if is_cumulative else start
        piece = {
            "text": whole["text"][begin * 5 // 2 : end * 5 // 2],
            "output_ids": whole["output_ids"][begin:end],
            "meta_info": {
                **meta,
                "finish_reason": meta["finish_reason"] if end == num_tokens else None,
                "completion_tokens": end,
                "weight_version": "0",
                "output_token_logprobs": meta["output_token_logprobs"][begin:end],
                "weight_versions": [{"version": "0", "start": 0, "end": end}],
            },
        }
        events.append(b"data: " + orjson.dumps(piece) + b"\n\n")
        start = end
    return [*events, b"data: [DONE]\n\n"]


def serve_stub(
    num_tokens: int, num_held: int, num_answered: int, interval: int, is_cumulative: bool
) -> None:
    """The engine. The first `num_held` requests are answered when all of them have come: the first
    `num_answered` of them finished, the others when they are aborted. Later ones at once."""
    whole = answer_bytes(num_tokens, {"type": "length", "length": num_tokens})
    cut = answer_bytes(num_tokens // 2, {"type": "abort", "message": "aborted"})
    pieces = pieces_of(num_tokens, interval, is_cumulative=is_cumulative) if interval else []
    all_came, is_aborted = asyncio.Event(), asyncio.Event()
    num_came = 0

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)  # pieces of different answers come in turn
        return response

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal num_came
        await request.read()
        if pieces:
            return await stream(request)
        number, num_came = num_came, num_came + 1
        if num_came >= num_held:
            all_came.set()
        body = whole
        if number < num_held:
            await all_came.wait()
            if number >= num_answered:
                await is_aborted.wait()
                body = cut
        return web.Response(body=body, content_type="application/json")

    async def abort(request: web.Request) -> web.Response:
        is_aborted.set()
        return web.json_response({"success": True})

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "stub", "weight_version": "0"})

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", generate)
        app.router.add_post("/abort_request", abort)
        app.router.add_get("/model_info", info)
        app.router.add_route("*", "/{path:.*}", nothing)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


class Stopwatch:
    """CPU seconds of the driver's thread inside named functions."""

    def __init__(self) -> None:
        self.seconds: Seconds = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[label] += time.thread_time() - started

        setattr(owner, name, timed)


async def heartbeat(worst: dict[str, float]) -> None:
    """How late a timer is at most, by the clock, and the CPU time until then."""
    clock, cpu = time.monotonic(), time.thread_time()
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        now, spent = time.monotonic(), time.thread_time()
        worst["clock"] = max(worst["clock"], now - clock - HEARTBEAT_S)
        worst["cpu"] = max(worst["cpu"], spent - cpu)
        clock, cpu = now, spent


@dataclass
class Job:
    """One batch: how many samples are asked for and are in it, and how many requests at once."""

    num_asked: int
    num_wanted: int
    num_tokens: int
    limit: int
    num_held: int = 0
    num_answered: int = 0
    stream_interval: int | None = None
    is_cumulative: bool = False


@contextmanager
def stub_engine(job: Job) -> Iterator[str]:
    """The engine in a process of its own; its URL."""
    numbers = (job.num_tokens, job.num_held, job.num_answered, job.stream_interval or 0)
    arguments = [str(n) for n in (*numbers, int(job.is_cumulative))]
    command = [sys.executable, __file__, "--stub", *arguments]
    stub = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert stub.stdout is not None
        yield f"http://127.0.0.1:{int(stub.stdout.readline())}"
    finally:
        stub.kill()
        stub.wait()


def rollout_side(job: Job, pool: Any, folder: Path) -> tuple[Any, Any]:
    """The real manager over a pool, and the context that its generate functions see."""
    from rollmill.config.reward import RewardConfig
    from rollmill.config.rollout import RolloutConfig
    from rollmill.config.sampling import SamplingConfig
    from rollmill.data.ledger import Ledger
    from rollmill.data.loading import Dataset, Part
    from rollmill.data.prompts import PromptRow
    from rollmill.data.source import PromptSource
    from rollmill.filters import DynamicFilter
    from rollmill.rollout.group import GroupRunner
    from rollmill.rollout.hooks import LoadedHooks, generate_overrides
    from rollmill.rollout.manager import RolloutManager, RolloutParts
    from rollmill.sample import int_array
    from rollmill.testing import make_context

    async def generate(sample: Any, context: Any) -> Any:
        await context.extend(sample)
        if sample.status.is_finished:
            sample.reward = float(sample.attempt % 2)
        return sample

    sampling = SamplingConfig(max_new_tokens=job.num_tokens)
    config = RolloutConfig.model_validate(
        {
            "batch_size": job.num_wanted // GROUP_SIZE,
            "over_sampling_batch_size": job.num_asked // GROUP_SIZE,
            "n_samples_per_prompt": GROUP_SIZE,
            "sampling": sampling.model_dump(),
            "filters": {"dynamic": "nonzero_std"},
        }
    )
    rows = tuple(
        PromptRow(f"prompt {i}", int_array([i % 1000 + 3] * PROMPT_TOKENS), "label", {"row": i})
        for i in range(job.num_asked // GROUP_SIZE)
    )
    source = PromptSource(Dataset((Part("made up", rows),)), n_samples_per_prompt=GROUP_SIZE)
    context_length = PROMPT_TOKENS + job.num_tokens
    context = make_context(
        pool, sampling=sampling, context_length=context_length, max_requests=job.limit
    )
    runner = GroupRunner(
        generate=generate,
        overrides=generate_overrides(folder),
        context=replace(context, new_index=source.new_index),
        judge=None,  # type: ignore[arg-type]  # rewards are set while generating
        reward=RewardConfig(type="math"),
        max_retries=0,
    )
    parts = RolloutParts(
        source=source,
        ledger=Ledger(folder / "ledger.sqlite"),
        runner=runner,
        dynamic_filter=DynamicFilter(config.filters, reward_key=None, base_dir=folder),
        ranking=None,
        hooks=LoadedHooks(generate=generate),
        reward_key=None,
    )
    return RolloutManager(config, parts), context


async def collect(job: Job, url: str, folder: Path, watch: PhaseWatch | None) -> Any:
    """One batch through the real rollout side: CPU, seconds, longest turn, metrics."""
    from rollmill.config.engine import EngineConfig
    from rollmill.engine.pool import EnginePool

    engine = EngineConfig(
        urls=(url,),
        max_concurrent_requests=job.limit,
        health_interval_s=60,
        stream_interval=job.stream_interval,
    )
    async with EnginePool(engine, model_path="none", run_dir=folder) as pool:
        manager, context = rollout_side(job, pool, folder)
        worst = {"clock": 0.0, "cpu": 0.0}
        beat = asyncio.create_task(heartbeat(worst))
        if watch is not None:
            watch.begin(context)
        cpu, clock = time.process_time(), time.monotonic()
        batch = await manager.collect(step=1, version=0)
        manager.consumed(batch, 1)
        spent, elapsed = time.process_time() - cpu, time.monotonic() - clock
        beat.cancel()
        if watch is not None:
            await asyncio.sleep(0)  # the turn that ended the batch counts as well
            watch.end()
        return spent, elapsed, worst, batch.metrics


class PhaseWatch:
    """A `LoopWatch` that tells submission, answers and the end of the batch apart."""

    def __init__(self) -> None:
        import rollmill.rollout.manager as manager
        from rollmill.data.ledger import Ledger

        self._context: Any = None
        self.loop_watch = LoopWatch(self._phase)
        self.loop_watch.time_calls(Ledger, "flush", "writing of the ledger")
        self.loop_watch.time_calls(manager, "batch_metrics", "computing of batch metrics")

    def begin(self, context: Any) -> None:
        """From here on."""
        self._context = context
        self.loop_watch.attach(asyncio.get_running_loop())

    def end(self) -> None:
        """Leave out what comes next: the closing of connections."""
        self._context = None

    def _phase(self) -> str:
        if self._context is None:
            return ""
        if self._context.gate.is_closed:
            return "end of the batch"
        return "answers" if self._context.usage.num_generated else "submission"


def start_watch() -> Stopwatch:
    import rollmill.engine.client as client
    import rollmill.rollout.manager as manager
    from rollmill.data.ledger import Ledger
    from rollmill.engine.stream import StreamedAnswer
    from rollmill.rollout.generate import GenerateContext

    watch = Stopwatch()
    watch.wrap(StreamedAnswer, "feed", "take pieces")
    watch.wrap(client, "parse_generate", "decode and check answers")
    watch.wrap(client, "encode", "encode requests")
    watch.wrap(GenerateContext, "_append", "segments and text")
    watch.wrap(Ledger, "record", "ledger")
    watch.wrap(manager, "batch_metrics", "batch metrics")
    return watch


def run(job: Job, watch: PhaseWatch | None = None) -> Any:
    """Stub, event loop and rollout side of one batch."""
    from rollmill.event_loop import new_event_loop

    with (
        stub_engine(job) as url,
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        return runner.run(collect(job, url, Path(folder), watch))


def report_overhead(job: Job) -> None:
    watch = start_watch()
    spent, elapsed, worst, metrics = run(job)
    num_samples = job.num_asked
    print(f"{num_samples} samples of {job.num_tokens} tokens, at most {job.limit} requests at once "
          f"(seen: {metrics['rollout/max_requests_in_flight']:.0f})")  # fmt: skip
    print(f"driver CPU per sample   {spent / num_samples * 1e3:6.2f} ms")
    for label, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
        print(f"  {label:<24}{seconds / num_samples * 1e3:6.2f} ms")
    rest = spent - sum(watch.seconds.values())
    print(f"  {'HTTP, event loop, rest':<24}{rest / num_samples * 1e3:6.2f} ms")
    print(f"samples per second      {num_samples / elapsed:6.0f}")
    report_longest(worst)


def report_burst(job: Job, what: str) -> None:
    watch = PhaseWatch()
    _, elapsed, worst, metrics = run(job, watch)
    print(f"\n{what}: {metrics['rollout/max_requests_in_flight']:.0f} requests in flight, "
          f"{job.num_tokens} tokens, {elapsed:.1f} s")  # fmt: skip
    watch.loop_watch.report()
    report_longest(worst)


def report_longest(worst: dict[str, float]) -> None:
    print(f"a timer was late by at most {worst['clock'] * 1e3:.0f} ms, with "
          f"{worst['cpu'] * 1e3:.0f} ms of CPU in between")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--burst", type=int, default=0)
    parser.add_argument("--part", choices=("answers", "abort"), help=argparse.SUPPRESS)
    parser.add_argument("--stream-interval", type=int)
    parser.add_argument("--cumulative", action="store_true")
    parser.add_argument("--stub", nargs=5, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    from rollmill.engine.open_files import raise_limit

    raise_limit()
    burst, tokens = options.burst, options.tokens
    if options.stub:
        *numbers, is_cumulative = options.stub
        serve_stub(*numbers, is_cumulative=bool(is_cumulative))
    elif not burst:
        freeze()
        job = Job(options.samples, options.samples, tokens, options.in_flight)
        report_overhead(
            replace(job, stream_interval=options.stream_interval, is_cumulative=options.cumulative)
        )
    elif options.part == "answers":
        freeze()
        report_burst(Job(burst, burst, tokens, burst, burst, burst), "all answers at once")
    elif options.part == "abort":
        freeze()
        report_burst(Job(burst, GROUP_SIZE, tokens, burst, burst, GROUP_SIZE), "abort of all")
    else:  # a fresh process each, as the first leaves its garbage to the second
        for part in ("answers", "abort"):
            subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)


def freeze() -> None:
    """The imports, and garbage collection as the command line sets it."""
    import rollmill.engine.pool
    import rollmill.rollout.manager  # noqa: F401

    gc.freeze()
    gc.set_threshold(20_000, 250, 1000)


if __name__ == "__main__":
    main()
