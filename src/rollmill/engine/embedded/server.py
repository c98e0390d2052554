"""The embedded engine as an HTTP server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from aiohttp import web
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from rollmill.config.engine import EmbeddedEngineConfig
from rollmill.engine.embedded import (
    control,
    deltas,
    distributed,
    generate,
    info,
    metrics,
    openai,
    sessions,
    tensors,
    tokens,
    updates,
)
from rollmill.engine.embedded.broker import Broker
from rollmill.engine.embedded.engine import EmbeddedEngine
from rollmill.engine.embedded.groups import UpdateGroups
from rollmill.engine.embedded.model import ModelRunner
from rollmill.engine.embedded.ports import bind, port_error
from rollmill.engine.embedded.replies import errors_as_json
from rollmill.engine.embedded.requests import ModelFacts
from rollmill.engine.embedded.responses import TextReader
from rollmill.engine.embedded.state import STATE, ServerState
from rollmill.engine.embedded.stopping import StopRules, eos_token_ids
from rollmill.errors import ModelError

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 2**20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def serve(
    model_path: str,
    config: EmbeddedEngineConfig | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    context_length: int | None = None,
    tokenizer_path: str | None = None,
    weight_version: str = "default",
    on_ready: Callable[[str], None] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Load a model and serve it until SIGINT or SIGTERM.

    Args:
        model_path: model folder.
        config: the engine's settings.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        context_length: overrides the model's own limit.
        tokenizer_path: tokenizer folder when it is not the model's.
        weight_version: name of the weights that are loaded at the start.
        on_ready: called with the URL once requests are answered.
        listener: a socket that is bound already; `host` and `port` then only name it.

    Raises:
        EngineError: the port is taken.
        ModelError: the model or tokenizer cannot be loaded.
    """
    config = config or EmbeddedEngineConfig()
    transformers_logging.disable_progress_bar()
    listener = listener or bind(host, port)
    url = f"http://{host}:{listener.getsockname()[1]}"
    runner = ModelRunner(model_path, config, context_length=context_length)
    tokenizers = load_tokenizers(tokenizer_path or model_path, is_given=tokenizer_path is not None)

    async def main() -> None:
        app = build_app(
            runner,
            tokenizers,
            config,
            model_path=model_path,
            tokenizer_path=tokenizer_path or model_path,
            weight_version=weight_version,
        )
        await _serve_until_signalled(app, listener, url, on_ready)

    asyncio.run(main())


def build_app(
    runner: ModelRunner,
    tokenizers: tuple[Any, Any] | None,
    config: EmbeddedEngineConfig,
    *,
    model_path: str,
    tokenizer_path: str,
    weight_version: str = "default",
) -> web.Application:
    """The web application of one engine; call it inside the event loop that will serve it.

    The engine's thread starts with the application and ends with it.
    """
    http_tokenizer, model_tokenizer = tokenizers or (None, None)
    broker = Broker(asyncio.get_running_loop())
    stops = StopRules(eos_token_ids(runner.model, http_tokenizer), model_tokenizer)
    engine = EmbeddedEngine(
        runner,
        stops,
        weight_version=weight_version,
        notify=broker.notify,
        num_threads=config.num_threads,
    )
    seeds = random.Random(config.seed)
    facts = ModelFacts(
        vocab_size=runner.vocab_size,
        context_length=runner.context_length,
        encode=None if http_tokenizer is None else http_tokenizer.encode,
        next_seed=lambda: seeds.getrandbits(63),
        fits=engine.scheduler.check_fits,
        has_experts=runner.experts.has_experts,
    )
    state = ServerState(
        engine=engine,
        broker=broker,
        facts=facts,
        reader=TextReader(http_tokenizer),
        tokenizer=http_tokenizer,
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        served_model_name=os.path.basename(os.path.normpath(model_path)),
        settings=config.model_dump(mode="json"),
        groups=UpdateGroups(runner.device),
    )
    app = web.Application(middlewares=[errors_as_json], client_max_size=_MAX_BODY_BYTES)
    app[STATE] = state
    app.add_routes(_routes())

    async def start_and_stop(_: web.Application) -> Any:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    async def end_requests(_: web.Application) -> None:
        """Before the server waits for its handlers: they wait for the engine."""
        await asyncio.to_thread(engine.stop)

    app.cleanup_ctx.append(start_and_stop)
    app.on_shutdown.append(end_requests)
    return app


def load_tokenizers(path: str, *, is_given: bool) -> tuple[Any, Any] | None:
    """Two tokenizers (they are not to be shared between threads), or None when there is none.

    Raises:
        ModelError: a tokenizer was named or is there but cannot be loaded.
    """
    has_files = any(os.path.exists(os.path.join(path, name)) for name in _TOKENIZER_FILES)
    if not has_files and not is_given:
        logger.warning("%s has no tokenizer: token ids only, no text", path)
        return None
    try:
        one, other = (AutoTokenizer.from_pretrained(path, local_files_only=True) for _ in range(2))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer cannot be loaded: {error}", where=path) from error
    return one, other


def exit_now(code: int) -> NoReturn:
    """End this process, whose server has ended, without taking the interpreter apart: with torch
    loaded that takes seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_with_stdin() -> None:
    """End this process at once when stdin closes, so that it never outlives a killed parent."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="rollmill-stdin", daemon=True).start()


async def _serve_until_signalled(
    app: web.Application,
    listener: socket.socket,
    url: str,
    on_ready: Callable[[str], None] | None,
) -> None:
    # Cancelled handlers are how a client's disconnect aborts its request.
    server = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await server.setup()
    try:
        try:
            await web.SockSite(server, listener, backlog=1024).start()
        except OSError as error:  # another process that was loading too has listened first
            raise port_error(url, error) from error
        logger.info("ready on %s", url)
        if on_ready is not None:
            on_ready(url)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        await stopped.wait()
    finally:
        await server.cleanup()


def _routes() -> list[web.RouteDef]:
    both = [
        ("/flush_cache", control.flush_cache),
        ("/release_memory_occupation", control.release_memory_occupation),
        ("/resume_memory_occupation", control.resume_memory_occupation),
        ("/slow_down", control.slow_down),
        ("/get_weights_by_name", updates.get_weights_by_name),
        ("/weights_checker", updates.weights_checker),
    ]
    get = [
        ("/health", info.health),
        ("/health_generate", info.health_generate),
        ("/ready", info.ready),
        ("/ping", info.ready),
        ("/model_info", info.model_info),
        ("/get_model_info", info.model_info),
        ("/server_info", info.server_info),
        ("/get_server_info", info.server_info),
        ("/v1/loads", info.loads),
        ("/get_load", info.get_load),
        ("/v1/models", openai.list_models),
        ("/v1/models/{model:.+}", openai.one_model),
        ("/metrics", metrics.metrics),
    ]
    post = [
        ("/generate", generate.generate),
        ("/abort_request", control.abort_request),
        ("/pause_generation", control.pause_generation),
        ("/continue_generation", control.continue_generation),
        ("/update_weights_from_disk", updates.update_weights_from_disk),
        ("/prepare_weights_from_delta", deltas.prepare_weights_from_delta),
        ("/update_weights_from_delta", deltas.update_weights_from_delta),
        ("/update_weight_version", updates.update_weight_version),
        ("/init_weights_update_group", distributed.init_weights_update_group),
        ("/destroy_weights_update_group", distributed.destroy_weights_update_group),
        ("/begin_weight_update", sessions.begin_weight_update),
        ("/end_weight_update", sessions.end_weight_update),
        ("/update_weights_from_distributed", distributed.update_weights_from_distributed),
        ("/update_weights_from_tensor", tensors.update_weights_from_tensor),
        ("/v1/completions", openai.completions),
        ("/v1/chat/completions", openai.chat_completions),
        ("/tokenize", tokens.tokenize),
        ("/v1/tokenize", tokens.tokenize),
        ("/detokenize", tokens.detokenize),
        ("/v1/detokenize", tokens.detokenize),
    ]
    routes = [web.put("/generate", generate.generate)]
    routes += [web.get(path, handler) for path, handler in itertools.chain(both, get)]
    routes += [web.post(path, handler) for path, handler in itertools.chain(both, post)]
    return routes
