"""The inference engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollmill.config.base import Section
from rollmill.config.model import Dtype


class EmbeddedEngineConfig(Section):
    """The built-in engine (`rollmill serve`)."""

    dtype: Dtype = "float32"
    """Precision of weights and compute. float32 keeps log-probs within 1e-4 of the trainer's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; null takes all cores (the engine sleeps while the trainer works)."""
    max_running_requests: int = Field(64, ge=1)
    """Requests decoded together; more wait in the queue."""
    max_total_tokens: int | None = Field(None, ge=2)
    """Tokens of KV cache; null sizes it for max_running_requests at the context length, within
    a quarter of the memory that is free."""
    chunked_prefill_tokens: int = Field(512, ge=1)
    """Prompt tokens computed in one step between two decoding steps."""
    hold_finished: bool = True
    """Keep the KV of finished answers, so that a conversation's next turn computes only its new
    tokens. Forgotten at every weight update and when room is needed."""
    seed: int = 0
    """Seed of requests that bring none."""


RouterPolicy = Literal["manual", "cache_aware", "round_robin", "random", "power_of_two"]


class EngineConfig(Section):
    """Which engines the run uses and how it talks to them."""

    urls: tuple[str, ...] = ()
    """Engines that run already (SGLang or `rollmill serve`); never started or stopped by us."""
    num_engines: int = Field(1, ge=1)
    """Embedded engines to start when `urls` is empty."""
    host: str = "127.0.0.1"
    """Address that embedded engines listen on; loopback unless you say otherwise."""
    port: int | None = Field(None, ge=1, le=65535)
    """Port of the first embedded engine, the next ones follow; null takes free ports."""
    max_concurrent_requests: int = Field(256, ge=1)
    """Requests in flight over all engines. Counts requests, not groups."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one generate call, with its retries and waits for a busy engine (429, 503)."""
    max_retries: int = Field(3, ge=0)
    """Further tries after broken connections and 502/504. A busy engine (429, 503) slows requests
    down and costs no try; another 4xx is never sent again."""
    start_timeout_s: float = Field(180.0, gt=0)
    """How long an engine may take to answer its first health check."""
    health_interval_s: float = Field(10.0, gt=0)
    """Time between two health checks."""
    health_timeout_s: float = Field(20.0, gt=0)
    """How long an engine may take to answer a health check. SGLang generates a token for it."""
    health_strikes: int = Field(3, ge=1)
    """Health checks that must fail in a row before an engine counts as dead. It gets no new
    requests from the first one on."""
    max_restarts: int = Field(3, ge=0)
    """Starts of a dead engine that may fail in a row before it is given up; when all engines
    are, the run stops. Engines given by `urls` are waited for instead."""
    stream_interval: int | None = Field(None, ge=1)
    """Have answers come in pieces of so many tokens, so that an engine that dies loses fewer than
    that: another one goes on from the tokens that arrived. null has answers come whole; those of
    a dead engine are then written from their start again. See docs/engines.md for the cost."""
    return_routed_experts: bool = False
    """Ask engines which experts each token used, and keep that with the sample: for models with
    experts. SGLang needs `--enable-return-routed-experts`; the SGLang router cannot carry it."""
    offload: bool = False
    """Free the engines' weights and KV cache while the trainer works, and the trainer's GPU memory
    while they do: for engines that share a GPU, or little memory, with it."""
    router: Literal["none", "sglang"] = "none"
    """`none`: requests go straight to the engine with the least outstanding tokens, a group's to
    the same one. `sglang`: they go through an SGLang router started for the run (`pip install
    rollmill[router]`), which cannot carry every field: see docs/engines.md."""
    router_policy: RouterPolicy = "manual"
    """How the SGLang router chooses an engine. `manual` keeps the requests of a group together."""
    router_port: int | None = Field(None, ge=1, le=65535)
    """Port of the SGLang router; null takes a free one."""
    embedded: EmbeddedEngineConfig = EmbeddedEngineConfig()
    """The built-in engine's own settings."""

    @model_validator(mode="after")
    def _urls_are_addresses(self) -> EngineConfig:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: expected http://HOST:PORT, found {url!r}")
        return self

    @model_validator(mode="after")
    def _router_carries_what_is_asked(self) -> EngineConfig:
        if self.return_routed_experts and self.router == "sglang":
            raise ValueError(
                "engine.return_routed_experts: the SGLang router cannot carry it; expected "
                "engine.router: none"
            )
        if self.stream_interval is not None and self.router == "sglang":
            raise ValueError(
                "engine.stream_interval: the SGLang router cannot carry it; expected "
                "engine.router: none"
            )
        return self
