"""What one sample costs the driver: 512 prompt tokens, 8,192 response tokens with log-probs.

    python bench/rollout_overhead.py [--samples 1024] [--tokens 8192] [--in-flight 256]
    python bench/rollout_overhead.py --burst 4096      requests in flight: is the event loop free?

A stub engine in a process of its own answers every request with the same bytes, so that nearly all
time is the driver's. The driver is the real one: engine pool and client, parsing and its checks,
segments, group, collector, ledger, metrics. Reported is CPU time per sample (the wall clock also
shows the stub and whatever else the machine does), where it goes, and how long one turn of the
event loop took at most, in CPU time and by the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

PROMPT_TOKENS = 512
GROUP_SIZE = 8
HEARTBEAT_S = 0.001


def answer_bytes(num_tokens: int) -> bytes:
    draw = random.Random(0)
    ids = [draw.randrange(3, 150_000) for _ in range(num_tokens)]
    meta = {
        "id": "x",
        "finish_reason": {"type": "length", "length": num_tokens},
        "output_token_logprobs": [[-draw.expovariate(3.0), token, None] for token in ids],
        "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}],
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": 0,
    }
    text = " ".join("word" for _ in range(num_tokens // 2))
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


def serve_stub(num_tokens: int, spread_s: float) -> None:
    """The engine: every answer after a random part of `spread_s` seconds."""
    body = answer_bytes(num_tokens)
    draw = random.Random(1)

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        if spread_s:
            await asyncio.sleep(spread_s * (0.3 + 0.7 * draw.random()))
        return web.Response(body=body, content_type="application/json")

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "stub", "weight_version": "0"})

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", generate)
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
        self.seconds: Counter[str] = Counter()

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
    """The longest turn of the event loop: CPU time, and time by the clock."""
    clock, cpu = time.monotonic(), time.thread_time()
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        now, spent = time.monotonic(), time.thread_time()
        worst["clock"] = max(worst["clock"], now - clock - HEARTBEAT_S)
        worst["cpu"] = max(worst["cpu"], spent - cpu)
        clock, cpu = now, spent


async def collect(url: str, num_samples: int, num_tokens: int, limit: int, folder: Path) -> Any:
    """One batch of `num_samples` answers through the real rollout side."""
    from rollmill.config.engine import EngineConfig
    from rollmill.config.reward import RewardConfig
    from rollmill.config.rollout import RolloutConfig
    from rollmill.config.sampling import SamplingConfig
    from rollmill.data.ledger import Ledger
    from rollmill.data.loading import Dataset, Part
    from rollmill.data.prompts import PromptRow
    from rollmill.data.source import PromptSource
    from rollmill.engine.pool import EnginePool
    from rollmill.filters import DynamicFilter
    from rollmill.rollout.group import GroupRunner
    from rollmill.rollout.hooks import LoadedHooks, generate_overrides
    from rollmill.rollout.manager import RolloutManager, RolloutParts
    from rollmill.sample import int_array
    from rollmill.testing import make_context

    async def generate(sample: Any, context: Any) -> Any:
        await context.extend(sample)
        sample.reward = float(sample.attempt % 2)
        return sample

    sampling = SamplingConfig(max_new_tokens=num_tokens)
    config = RolloutConfig.model_validate(
        {
            "batch_size": num_samples // GROUP_SIZE,
            "n_samples_per_prompt": GROUP_SIZE,
            "sampling": sampling.model_dump(),
            "filters": {"dynamic": "nonzero_std"},
        }
    )
    engine = EngineConfig(urls=(url,), max_concurrent_requests=limit, health_interval_s=60)
    rows = tuple(
        PromptRow(f"prompt {i}", int_array([i % 1000 + 3] * PROMPT_TOKENS), "label", {"row": i})
        for i in range(num_samples // GROUP_SIZE)
    )
    source = PromptSource(Dataset((Part("made up", rows),)), n_samples_per_prompt=GROUP_SIZE)
    hooks = LoadedHooks(generate=generate)
    async with EnginePool(engine, model_path="none", run_dir=folder) as pool:
        context = make_context(
            pool, sampling=sampling, context_length=PROMPT_TOKENS + num_tokens, max_requests=limit
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
            hooks=hooks,
            reward_key=None,
        )
        manager = RolloutManager(config, parts)
        worst = {"clock": 0.0, "cpu": 0.0}
        beat = asyncio.create_task(heartbeat(worst))
        cpu, clock = time.process_time(), time.monotonic()
        batch = await manager.collect(step=1, version=0)
        manager.consumed(batch, 1)
        spent, elapsed = time.process_time() - cpu, time.monotonic() - clock
        beat.cancel()
        return spent, elapsed, worst, batch.metrics


def start_watch() -> Stopwatch:
    import rollmill.engine.client as client
    import rollmill.rollout.manager as manager
    from rollmill.data.ledger import Ledger
    from rollmill.rollout.generate import GenerateContext

    watch = Stopwatch()
    watch.wrap(client, "parse_generate", "decode and check answers")
    watch.wrap(client, "encode", "encode requests")
    watch.wrap(GenerateContext, "_append", "segments and text")
    watch.wrap(Ledger, "record", "ledger")
    watch.wrap(manager, "batch_metrics", "batch metrics")
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--burst", type=int, default=0)
    parser.add_argument("--stub", nargs=2, metavar=("TOKENS", "SPREAD_S"))
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.stub:
        serve_stub(int(options.stub[0]), float(options.stub[1]))
        return
    samples = options.burst or options.samples
    limit = options.burst or options.in_flight
    spread_s = options.burst / 400
    command = [sys.executable, __file__, "--stub", str(options.tokens), str(spread_s)]
    stub = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert stub.stdout is not None
        url = f"http://127.0.0.1:{int(stub.stdout.readline())}"
        from rollmill.event_loop import new_event_loop

        gc.freeze()  # as the command line does
        gc.set_threshold(100_000, 50, 1000)
        watch = start_watch()
        with tempfile.TemporaryDirectory() as folder:
            work = collect(url, samples, options.tokens, limit, Path(folder))
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                spent, elapsed, worst, metrics = runner.run(work)
    finally:
        stub.kill()
        stub.wait()
    print(f"{samples} samples of {options.tokens} tokens, at most {limit} requests at once "
          f"(seen: {metrics['rollout/max_requests_in_flight']:.0f})")  # fmt: skip
    print(f"driver CPU per sample   {spent / samples * 1e3:6.2f} ms")
    for label, seconds in watch.seconds.most_common():
        print(f"  {label:<24}{seconds / samples * 1e3:6.2f} ms")
    rest = spent - sum(watch.seconds.values())
    print(f"  {'HTTP, event loop, rest':<24}{rest / samples * 1e3:6.2f} ms")
    print(f"samples per second      {samples / elapsed:6.0f}")
    print(f"longest turn of the event loop: {worst['cpu'] * 1e3:.0f} ms CPU, "
          f"{worst['clock'] * 1e3:.0f} ms by the clock")  # fmt: skip


if __name__ == "__main__":
    main()
