"""What the engine says about itself: health, model, load."""

from __future__ import annotations

import asyncio
import datetime
import time
from typing import Any

from aiohttp import web

import rollmill
from rollmill.engine.embedded.generate import submitted, wait_for_all
from rollmill.engine.embedded.replies import json_reply
from rollmill.engine.embedded.requests import parse_generate
from rollmill.engine.embedded.state import STATE, ServerState
from rollmill.exchange.machine import machine_name

_HEALTH_TIMEOUT_S = 20.0


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 when the model's thread answers between two steps, else 503."""
    engine = request.app[STATE].engine
    if not engine.is_alive:
        return web.Response(status=503)
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            await asyncio.wrap_future(engine.call(lambda: None))
    except TimeoutError:
        return web.Response(status=503)
    return web.Response()


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: writes one token; while paused it only checks the model's thread."""
    state = request.app[STATE]
    engine = state.engine
    if engine.pause_mode is not None or engine.released or not engine.is_alive:
        return await health(request)
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    call = parse_generate(body, state.facts)
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            with submitted(state, call.sequences) as queues:
                await wait_for_all(call.sequences, queues)
    except TimeoutError:
        return web.Response(status=503)
    reason = call.sequences[0].finish_reason or {}
    return web.Response(status=503 if reason.get("status_code") else 200)


async def ready(request: web.Request) -> web.Response:
    """GET /ready and /ping: whether the model's thread runs; instant."""
    return web.Response(status=200 if request.app[STATE].engine.is_alive else 503)


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info."""
    state = request.app[STATE]
    config = state.engine.runner.model.config
    return json_reply(
        {
            "model_path": state.model_path,
            "served_model_name": state.served_model_name,
            "tokenizer_path": state.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": state.engine.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: settings and state."""
    state = request.app[STATE]
    engine = state.engine
    limits = engine.runner.limits
    return json_reply(
        {
            **state.settings,
            "engine": "rollmill-embedded",
            "machine": machine_name(),
            "model_path": state.model_path,
            "served_model_name": state.served_model_name,
            "tokenizer_path": state.tokenizer_path,
            "weight_version": engine.weight_version,
            "context_length": limits.context_length,
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running,
            "dtype": str(engine.runner.dtype).removeprefix("torch."),
            "device": str(engine.runner.device),
            "version": rollmill.__version__,
            "status": "ready",
            "startup_time": state.started_at,
            "internal_states": [
                {
                    "weight_version": engine.weight_version,
                    "pause_mode": engine.pause_mode,
                    "released": sorted(engine.released),
                    "steps": engine.counters.steps,
                    "last_gen_throughput": engine.counters.throughput(),
                }
            ],
        }
    )


async def loads(request: web.Request) -> web.Response:
    """GET /v1/loads."""
    state = request.app[STATE]
    return json_reply(
        {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": rollmill.__version__,
            "accelerator": None if state.engine.runner.device.type == "cpu" else "cuda",
            "num_accelerators": 1,
            "loads": [_load(state)],
        }
    )


async def get_load(request: web.Request) -> web.Response:
    """GET /get_load: the shorter list of earlier SGLang releases, one entry per rank."""
    state = request.app[STATE]
    load = _load(state)
    return json_reply(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
                "ts_tic": time.monotonic(),
            }
        ]
    )


def _load(state: ServerState) -> dict[str, Any]:
    engine = state.engine
    scheduler, counters = engine.scheduler, engine.counters
    used, total = scheduler.tokens_reserved, scheduler.limits.max_total_tokens
    num_running = len(scheduler.running) + len(scheduler.fills)
    num_waiting = len(scheduler.waiting)
    is_retracted = engine.pause_mode == "retract"
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": num_running,
        "num_waiting_reqs": num_waiting,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": total,
        "max_running_requests": scheduler.limits.max_running,
        "token_usage": used / total,
        "gen_throughput": counters.throughput(),
        "cache_hit_rate": counters.cached_tokens / max(counters.prompt_tokens, 1),
        "utilization": num_running / scheduler.limits.max_running,
        "memory": {"token_capacity": total},
        "queues": {
            "waiting": num_waiting,
            "grammar": 0,
            "paused": num_running if engine.pause_mode == "in_place" else 0,
            "retracted": num_waiting if is_retracted else 0,
        },
    }
