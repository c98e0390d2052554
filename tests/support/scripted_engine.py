"""An engine without a model: speaks the real protocol over a socket, from a script.

In a test:

    async with ScriptedEngine(Script(length=20, faults=(Fault("http", nth=(3,)),))) as engine:
        ...  # engine.url, engine.requests, engine.counts["/generate"], engine.max_running_seen

Tests that need a moment "in the middle" hold the engine instead of sleeping:

    engine.hold(); ...; await engine.wait_for_running(4); ...; engine.release()

As a process: `python tests/support/scripted_engine.py --port N --script script.json` (it also takes
the command line of the embedded engine, so launchers can start it in the embedded engine's place).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from engine_script import Call, Fault, FaultKind, Script, log_prob_of
from scripted_stream import Stream


class Running:
    """One request being answered; positions advance with time, spans with weight versions."""

    def __init__(self, call: Call, tokens: list[int], stops: bool, limit: int | None) -> None:
        self.call = call
        self.tokens = tokens
        self.stops = stops
        self.limit = len(tokens) if limit is None else min(limit, len(tokens))
        self.is_stalled_at_limit = limit is not None
        self.done = 0
        self.carry_s = 0.0
        self.spans: list[list[Any]] = []
        self.retractions = 0
        self.abort_message: str | None = None
        self.has_started = False
        self.wake = asyncio.Event()

    def advance(self, number: int, version: str) -> None:
        number = min(number, self.limit - self.done)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] += number
        elif number > 0:
            self.spans.append([version, self.done, self.done + number])
        self.done += number

    def abort(self) -> None:
        self.abort_message = "Aborted" if self.has_started else "Abort in waiting queue"
        self.wake.set()


class ScriptedEngine:
    """The server. Attributes are plain: tests read and set them.

    Read: `requests` (calls in order of arrival), `counts` (by path), `events` (control calls in
    order, like "pause:retract", "update:3"), `running`, `max_running_seen`, `version`, `is_paused`.
    Set: `is_healthy`, `answers_health`, `obeys_aborts`, `answers_aborts`, `fails_updates`,
    `reported_version` (what /model_info says, when not the truth), `checksum` (of the weights).
    """

    def __init__(self, script: Script | None = None, *, host: str = "127.0.0.1", port: int = 0):
        self.script = script or Script()
        self.host = host
        self.port = port
        self.version = self.script.version
        self.requests: list[Call] = []
        self.counts: Counter[str] = Counter()
        self.events: list[str] = []
        self.running: dict[str, Running] = {}
        self.max_running_seen = 0
        self.is_paused = False
        self.is_healthy = True
        self.answers_health = True
        self.obeys_aborts = True
        self.answers_aborts = True
        self.fails_updates = False
        self.reported_version: str | None = None
        self.checksum: str | None = None
        self._is_held = False
        self._fault_counts: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after `stop`, on the same port again, with the script's first version."""
        self.version = self.script.version
        self.is_paused = False
        app = web.Application(client_max_size=1 << 28)
        app.middlewares.append(self._count)
        for method, path, handler in self._routes():
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Drop every connection, as a killed engine does."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None
        self.running.clear()

    def hold(self) -> None:
        """No request makes progress until `release`; aborts still work."""
        self._is_held = True
        self._wake_all()

    def release(self) -> None:
        self._is_held = False
        self._wake_all()

    async def wait_for_running(self, number: int) -> None:
        """Return when at least `number` requests are in the engine."""
        await self.wait_until(lambda: len(self.running) >= number)

    async def wait_until(self, condition: Any) -> None:
        """Return when `condition()` holds; looked at after everything that happens here."""
        while not condition():
            await self._changed.wait()

    def _routes(self) -> list[tuple[str, str, Any]]:
        posts = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update_weights,
            "/update_weight_version": self._update_weight_version,
            "/release_memory_occupation": self._memory,
            "/resume_memory_occupation": self._memory,
            "/weights_checker": self._checksum,
            "/flush_cache": self._flush,
        }
        gets = {
            "/health": self._health,
            "/health_generate": self._health,
            "/ready": self._health,
            "/ping": self._health,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._model_info,
            "/v1/loads": self._loads,
        }
        return [
            *(("POST", path, handler) for path, handler in posts.items()),
            *(("GET", path, handler) for path, handler in gets.items()),
        ]

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.counts[request.path] += 1
        self._notify()
        try:
            return await handler(request)
        finally:
            self._notify()

    # -- generation ------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = orjson.loads(await request.read())
            ids = tuple(body["input_ids"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            return _error(400, f"bad request: {error}")
        sampling = body.get("sampling_params") or {}
        rid = body.get("rid") or f"anonymous-{len(self.requests)}"
        call = Call(
            len(self.requests), rid, ids, sampling, request.headers.get("x-smg-routing-key")
        )
        self.requests.append(call)
        if not ids:
            return _error(400, "input_ids is empty")
        if rid in self.running:
            return _error(400, f"Duplicate request ID detected: {rid}")
        if call.max_new_tokens == 0:
            return _json(self._scored(call, body.get("logprob_start_len", -1)))
        fault = self._fault(call)
        if fault is not None and (response := await self._refuse(fault, request)) is not None:
            return response
        stream = Stream(request, self.script, body) if body.get("stream") else None
        return await self._answer(call, fault, bool(body.get("return_logprob")), stream)

    async def _refuse(self, fault: Fault, request: web.Request) -> web.StreamResponse | None:
        """Faults that come instead of generating."""
        if fault.kind == FaultKind.HTTP:
            return _error(fault.status, f"scripted {fault.status}")
        if fault.kind == FaultKind.HANG:
            await asyncio.Event().wait()
        if fault.kind == FaultKind.CUT and not fault.after:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        return None

    async def _answer(
        self, call: Call, fault: Fault | None, return_logprob: bool, stream: Stream | None
    ) -> web.StreamResponse:
        await self.wait_until(lambda: not self.is_paused)  # held at the front door, as SGLang does
        tokens, stops = self.script.answer(call)
        stalls = (FaultKind.STALL, FaultKind.CUT, FaultKind.STREAM_ERROR)
        limit = fault.after if fault is not None and fault.kind in stalls else None
        run = Running(call, tokens, stops, limit)
        self.running[call.rid] = run
        self.max_running_seen = max(self.max_running_seen, len(self.running))
        self._notify()
        try:
            if fault is not None and fault.kind == FaultKind.EMPTY_ABORT:
                run.abort()
            elif stream is not None:
                await self._write_streamed(run, stream, fault)
            else:
                await self._write(run)
        finally:
            self.running.pop(call.rid, None)
            self._wake_all()  # a slot is free
        if stream is not None:
            return await stream.end(self._describe(run, return_logprob), fault)
        answer = self._describe(run, return_logprob)
        return _mangled(answer, fault, call) if fault is not None else _json(answer)

    async def _write_streamed(self, run: Running, stream: Stream, fault: Fault | None) -> None:
        """Write, and send pieces on the way; returns early when the stream is to break."""
        breaks = fault is not None and fault.kind in (FaultKind.CUT, FaultKind.STREAM_ERROR)
        await stream.start()
        writing = asyncio.create_task(self._write(run))
        try:
            while not writing.done():
                changed = asyncio.create_task(self._changed.wait())
                # the last token comes with the reason for the end
                number = run.done if run.is_stalled_at_limit else run.done - 1
                await stream.send(self._describe(run, True), number)
                if breaks and run.done == run.limit:
                    return
                await asyncio.wait({writing, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, run: Running) -> None:
        """Advance with time, whatever pauses, holds, aborts and weight updates come between."""
        clock = asyncio.get_running_loop().time
        while run.abort_message is None and (run.done < run.limit or run.is_stalled_at_limit):
            self._notify()
            run.wake.clear()
            if self.is_paused or self._is_held or not self._has_slot(run) or run.done == run.limit:
                await run.wake.wait()
                continue
            run.has_started = True
            if self.script.token_s == 0.0:
                run.advance(run.limit, self.version)
                continue
            started, version = clock(), self.version
            needed_s = (run.limit - run.done) * self.script.token_s - run.carry_s
            try:
                async with asyncio.timeout(needed_s):
                    await run.wake.wait()
            except TimeoutError:
                run.advance(run.limit, version)
            else:
                spent_s = run.carry_s + clock() - started
                number = min(int(spent_s / self.script.token_s), run.limit - run.done)
                run.carry_s = spent_s - number * self.script.token_s
                run.advance(number, version)

    def _has_slot(self, run: Running) -> bool:
        if run.has_started or self.script.max_running is None:
            return True
        return sum(other.has_started for other in self.running.values()) < self.script.max_running

    def _fault(self, call: Call) -> Fault | None:
        for i, fault in enumerate(self.script.faults):
            is_used_up = fault.times is not None and self._fault_counts[i] >= fault.times
            if not is_used_up and fault.matches(call, self.script.seed):
                self._fault_counts[i] += 1
                return fault
        return None

    def _describe(self, run: Running, return_logprob: bool) -> dict[str, Any]:
        ids = run.tokens[: run.done]
        reason: dict[str, Any]
        if run.abort_message is not None:
            reason = {"type": "abort", "message": run.abort_message, "status_code": None}
        elif run.stops:
            reason = {"type": "stop", "matched": self.script.eos_id}
        else:
            reason = {"type": "length", "length": len(ids)}
        is_stopped = run.abort_message is None and run.stops and ids[-1:] == [self.script.eos_id]
        meta: dict[str, Any] = {
            "id": run.call.rid,
            "finish_reason": reason,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "num_retractions": run.retractions,
            "weight_version": run.spans[-1][0] if run.spans else self.version,
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in run.spans],
        }
        if run.has_started:
            meta["prompt_tokens"] = len(run.call.input_ids)
        if return_logprob:
            meta["output_token_logprobs"] = [[log_prob_of(t), t, None] for t in ids]
        text = self.script.render(ids[:-1] if is_stopped else ids)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _scored(self, call: Call, start: int) -> dict[str, Any]:
        entries: list[list[Any]] = [[log_prob_of(t), t, None] for t in call.input_ids[start:]]
        entries[0][0] = None
        meta = {
            "id": call.rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(call.input_ids),
            "input_token_logprobs": entries,
            "output_token_logprobs": [],
            "weight_versions": [{"version": self.version, "start": 0, "end": 0}],
        }
        return {"text": "", "output_ids": [], "meta_info": meta}

    # -- control ---------------------------------------------------------------------------

    async def _abort(self, request: web.Request) -> web.Response:
        if not self.answers_aborts:
            await asyncio.Event().wait()
        body = await request.json()
        everything = bool(body.get("abort_all"))
        self.events.append("abort_all" if everything else f"abort:{body.get('rid')}")
        known = body.get("rid") in self.running
        for rid, run in list(self.running.items()):
            if self.obeys_aborts and (everything or (known and rid.startswith(body["rid"]))):
                run.abort()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _error(400, f"bad mode {mode}")
        self.events.append(f"pause:{mode}")
        self.is_paused = True
        for run in list(self.running.values()):
            if mode == "abort":
                run.abort()
            elif mode == "retract":
                run.retractions += 1
        self._wake_all()
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await request.json()
        self.events.append("continue")
        self.is_paused = False
        self._wake_all()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = body["model_path"]
        if self.fails_updates or not os.path.isdir(folder):
            message = f"Failed to get weights iterator: {folder}"
            return _json({"success": False, "message": message}, 400)
        self._wake_all()
        await asyncio.sleep(0)  # running requests note their progress under the old version
        self.version = body.get("weight_version") or self.version
        self._wake_all()  # and go on under the new one
        self.events.append(f"update:{self.version}")
        return _json({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        self.events.append(f"version:{self.version}")
        return _json({"success": True, "message": "ok", "new_version": self.version})

    async def _memory(self, request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags") or []
        self.events.append(f"{request.path.split('_')[0][1:]}:{','.join(tags)}")
        return _json(None)

    async def _checksum(self, request: web.Request) -> web.Response:
        checksum = self.checksum or f"weights-{self.version}"
        return _json({"success": True, "per_engine_checksum": checksum})

    async def _flush(self, request: web.Request) -> web.Response:
        self.events.append("flush")
        return web.Response(text="Cache flushed.\n")

    async def _health(self, request: web.Request) -> web.Response:
        if not self.answers_health:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.is_healthy else 503)

    async def _model_info(self, request: web.Request) -> web.Response:
        version = self.reported_version or self.version
        return _json({"model_path": "scripted", "weight_version": version, "model_type": "script"})

    async def _loads(self, request: web.Request) -> web.Response:
        started = sum(run.has_started for run in self.running.values())
        load = {
            "num_running_reqs": started,
            "num_waiting_reqs": len(self.running) - started,
            "num_used_tokens": sum(run.done for run in self.running.values()),
        }
        return _json({"version": "scripted", "loads": [load]})

    def _wake_all(self) -> None:
        for run in self.running.values():
            run.wake.set()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status)


def _mangled(answer: dict[str, Any], fault: Fault, call: Call) -> web.Response:
    """Faults in an otherwise good answer."""
    meta = answer["meta_info"]
    match fault.kind:
        case FaultKind.MALFORMED_JSON:
            return web.Response(body=orjson.dumps(answer)[:-7], content_type="application/json")
        case FaultKind.MISSING_FIELD:
            del answer["meta_info"]
        case FaultKind.MISSING_LOG_PROBS:
            del meta["output_token_logprobs"]
        case FaultKind.LENGTH_MISMATCH:
            meta["output_token_logprobs"].pop()
        case FaultKind.POSITIVE_LOG_PROB:
            meta["output_token_logprobs"][0][0] = 0.5
        case FaultKind.WRONG_VERSION:
            for span in meta["weight_versions"]:
                span["version"] = "999999"
        case FaultKind.BAD_SPANS:
            meta["weight_versions"][0]["start"] = 1
        case FaultKind.UNKNOWN_FINISH:
            meta["finish_reason"] = {"type": "eos_reached"}
        case FaultKind.TOO_MANY_TOKENS:
            extra = [7] * (call.max_new_tokens + 1 - len(answer["output_ids"]))
            answer["output_ids"] += extra
            meta["output_token_logprobs"] += [[log_prob_of(t), t, None] for t in extra]
            meta["weight_versions"][-1]["end"] += len(extra)
    return _json(answer)


def _exit_with_stdin() -> None:
    """As the embedded engine: gone when the process that started us is gone."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


async def _serve(script: Script, host: str, port: int) -> None:
    engine = ScriptedEngine(script, host=host, port=port)
    await engine.start()
    print(f"scripted engine on {engine.url}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script")
    parser.add_argument("--weight-version")
    parser.add_argument("--exit-with-stdin", action="store_true")
    for unused in ("--config-json", "--context-length", "--tokenizer"):
        parser.add_argument(unused)
    options = parser.parse_args()
    if options.exit_with_stdin:
        _exit_with_stdin()
    raw: dict[str, Any] = {}
    if options.script:
        raw = json.loads(Path(options.script).read_text(encoding="utf-8"))
    if options.weight_version:
        raw["version"] = options.weight_version
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Script.from_json(raw), options.host, options.port))


if __name__ == "__main__":
    main()
