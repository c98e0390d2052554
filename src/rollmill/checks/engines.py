"""Checks of engines that run already: they answer, and they serve the model that is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import aiohttp

from rollmill.checks.finding import Finding, error, ok, warning
from rollmill.config import Config
from rollmill.data.template import Tokenizer
from rollmill.engine.client import EngineClient, ModelInfo
from rollmill.engine.errors import EngineCallError
from rollmill.exchange.machine import is_own_address
from rollmill.loop.policy import Policy
from rollmill.sample import Sample

TIMEOUT_S = 5.0
CUT_CHARACTER = "\ufffd"
"""What a character shows as whose last bytes were not written."""


def check_engine_urls(config: Config, policy: Policy) -> Iterator[Finding]:
    """Every engine of `engine.urls` answers, none says that it serves another model, and weights
    can get to each."""
    urls = config.engine.urls
    if config.weights.transport == "tensor":
        yield from _on_one_machine(urls)
    for url, answer in zip(urls, asyncio.run(_ask_all(config)), strict=True):
        if isinstance(answer, ModelInfo):
            yield from _served_model(url, answer, policy)
        else:
            yield error(
                "engine.urls",
                f"{url} does not answer: {answer}",
                "start it, or correct the address; engines given by url are never started by us",
            )


async def _ask_all(config: Config) -> list[ModelInfo | EngineCallError]:
    async with aiohttp.ClientSession() as session:
        return list(
            await asyncio.gather(*(_ask(url, config, session) for url in config.engine.urls))
        )


async def _ask(
    url: str, config: Config, session: aiohttp.ClientSession
) -> ModelInfo | EngineCallError:
    once = config.engine.model_copy(update={"max_retries": 0})
    client = EngineClient(url, once, session)
    try:
        return await client.model_info(timeout_s=TIMEOUT_S)
    except EngineCallError as problem:
        return problem
    finally:
        await client.close()


def _on_one_machine(urls: Sequence[str]) -> Iterator[Finding]:
    for url in urls:
        if not is_own_address(urlsplit(url).hostname or ""):
            yield error(
                "weights.transport",
                f"tensor hands weights over on one machine, and {url} is on another",
                "set weights.transport to distributed or disk",
            )


def _served_model(url: str, answer: ModelInfo, policy: Policy) -> Iterator[Finding]:
    served = answer.model_path.rstrip("/").rpartition("/")[2]
    if served == policy.folder.name:
        yield ok("engine.urls", f"{url} serves {served}, weights {answer.weight_version}")
    else:
        yield warning(
            "engine.urls",
            f"{url} serves {answer.model_path}, and {policy.folder} is trained",
            "fine when both are the same model under two names: log-probs are compared below",
        )


def check_texts(
    tokenizer: Tokenizer, samples: Sequence[Sample], *, has_stop_texts: bool
) -> Iterator[Finding]:
    """The engine's text of its answers is what our tokenizer makes of their tokens.

    Args:
        tokenizer: the run's.
        samples: answers with the engine's text as `response`.
        has_stop_texts: the engine cuts its text at stop strings, so ours may be longer.
    """
    told = [sample for sample in samples if sample.response and sample.response_length]
    if not told:
        yield ok("tokenizer of the engine", "not compared: the engine sends no text")
        return
    for sample in told:
        ours = tokenizer.decode(sample.response_tokens.tolist(), skip_special_tokens=True)
        theirs = sample.response.rstrip(CUT_CHARACTER)
        if not ours.startswith(theirs) or not (has_stop_texts or _is_same(ours, theirs)):
            yield error(
                "tokenizer of the engine",
                f"the engine reads its tokens as {theirs[:60]!r}, the trainer's tokenizer as "
                f"{ours[:60]!r}",
                "give the engine the tokenizer that model.tokenizer (or model.path) names",
            )
            return
    yield ok("tokenizer of the engine", f"it reads {len(told)} answers as the trainer's does")


def _is_same(ours: str, theirs: str) -> bool:
    return ours.rstrip(CUT_CHARACTER) == theirs
