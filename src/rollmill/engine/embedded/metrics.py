"""`/metrics` in Prometheus' text format, with SGLang's names where it has one."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollmill.engine.embedded.state import STATE, ServerState


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    lines = []
    for name, kind, text, value in _values(request.app[STATE]):
        lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}"]
        lines.append(f"sglang:{name} {float(value)}")
    return web.Response(
        body="\n".join([*lines, ""]).encode(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


def _values(state: ServerState) -> list[tuple[str, str, str, Any]]:
    engine = state.engine
    scheduler, counters = engine.scheduler, engine.counters
    limit, used = scheduler.limits.max_total_tokens, scheduler.tokens_reserved
    hit_rate = counters.cached_tokens / max(counters.prompt_tokens, 1)
    num_running = len(scheduler.running) + len(scheduler.fills)
    return [
        ("num_running_reqs", "gauge", "The number of running requests.", num_running),
        ("num_queue_reqs", "gauge", "The number of waiting requests.", len(scheduler.waiting)),
        ("num_used_tokens", "gauge", "Tokens of KV cache in use.", used),
        ("max_total_num_tokens", "gauge", "Tokens of KV cache there are.", limit),
        ("token_usage", "gauge", "Share of the KV cache in use.", used / limit),
        ("gen_throughput", "gauge", "Generated tokens per second.", counters.throughput()),
        ("cache_hit_rate", "gauge", "Share of prompt tokens not computed again.", hit_rate),
        ("num_requests_total", "counter", "Requests received.", counters.requests),
        ("num_aborted_requests_total", "counter", "Requests aborted.", counters.aborted),
        ("prompt_tokens_total", "counter", "Prompt tokens received.", counters.prompt_tokens),
        ("cached_tokens_total", "counter", "Prompt tokens reused.", counters.cached_tokens),
        ("generation_tokens_total", "counter", "Tokens generated.", counters.generated_tokens),
        ("engine_steps_total", "counter", "Forward passes.", counters.steps),
        ("engine_busy_seconds_total", "counter", "Time spent in steps.", counters.busy_s),
    ]
