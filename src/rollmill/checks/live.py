"""Checks with everything running: engines, trainer, one weight sync, and whether they agree."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.checks.engines import check_texts
from rollmill.checks.finding import Finding, error, from_error, ok, warning
from rollmill.checks.inputs import LoadedData
from rollmill.config import Config
from rollmill.engine.pool import EnginePool
from rollmill.errors import RollmillError
from rollmill.loop.policy import Policy, open_pool, start_trainer
from rollmill.loop.run_dir import RunDir
from rollmill.sample import Sample
from rollmill.sample_codec import encode_sample
from rollmill.weights import open_transport

NUM_SAMPLES = 4
MAX_TOKENS = 16
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.2}
"""Largest log-prob gap between engine and trainer that rounding alone explains."""


def check_live(config: Config, policy: Policy, data: LoadedData, base_dir: Path) -> list[Finding]:
    """Start engines and trainer, let them write a few answers, and compare their log-probs.

    Works in a temporary folder: the run folder is not touched.
    """
    with tempfile.TemporaryDirectory(prefix="rollmill-check-") as folder:
        try:
            return list(asyncio.run(_check(config, policy, data, base_dir, RunDir(Path(folder)))))
        except RollmillError as problem:
            return [from_error("engine and trainer", problem)]


async def _check(
    config: Config, policy: Policy, data: LoadedData, base_dir: Path, run_dir: RunDir
) -> list[Finding]:
    pool = open_pool(config, policy, run_dir)
    findings = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool)
        findings.append(ok("engine", f"{len(pool.clients)} reachable"))
        trainer = await start_trainer(stack, config, policy, run_dir, base_dir)
        facts = await trainer.call("describe")
        findings.append(ok("trainer", f"{facts['parameters']:,} parameters on {facts['device']}"))
        transport = open_transport(config, run_dir.root)
        stack.push_async_callback(transport.close)
        synced = await transport.sync(trainer, pool, 1)
        findings.append(
            ok(
                "weight sync",
                f"version 1 confirmed, {_checksums(config)}, generation held for "
                f"{synced['weights/pause_s']:.2f} s",
            )
        )
        samples = await _answers(config, policy, pool, data)
        stop = config.rollout.sampling.stop
        findings += check_texts(policy.tokenizer, samples, has_stop_texts=bool(stop))
        scores = await trainer.call(
            "score",
            samples=[encode_sample(sample) for sample in samples],
            temperature=config.rollout.sampling.temperature,
        )
        findings += _parity(config, samples, scores)
    return findings


def _checksums(config: Config) -> str:
    return "checksums agree" if config.weights.verify_checksum else "checksums not compared"


async def _answers(
    config: Config, policy: Policy, pool: EnginePool, data: LoadedData
) -> list[Sample]:
    rows = data.train[:NUM_SAMPLES]

    async def answer(number: int) -> Sample:
        row = rows[number]
        room = policy.context_length - len(row.prompt_tokens)
        limit = min(MAX_TOKENS, config.rollout.sampling.max_new_tokens, room)
        wire: dict[str, Any] = config.rollout.sampling.to_wire(max_new_tokens=limit, seed=number)
        result = await pool.generate(f"check/{number}", row.prompt_tokens, wire)
        segments = result.to_segments()
        return Sample(row.prompt_tokens, index=number, segments=segments, response=result.text)

    return list(await asyncio.gather(*(answer(number) for number in range(len(rows)))))


def _parity(config: Config, samples: list[Sample], scores: list[bytes]) -> Iterator[Finding]:
    gaps = np.concatenate(
        [
            np.abs(np.frombuffer(score, np.float32) - sample.rollout_log_probs)
            for sample, score in zip(samples, scores, strict=True)
        ]
    )
    if not gaps.size:
        yield warning("log-probs", "no token was generated to compare", "look at the prompts")
        return
    limit = max(MAX_GAP[config.engine.embedded.dtype], MAX_GAP[config.trainer.dtype])
    text = (
        f"engine and trainer differ by {gaps.mean():.1e} on average, {gaps.max():.1e} at most, "
        f"over {gaps.size} tokens"
    )
    if gaps.max() > limit:
        yield error(
            "log-probs",
            f"{text}; rounding explains up to {limit:g}",
            "the engine serves another model, tokenizer, temperature or precision than is trained",
        )
    else:
        yield ok("log-probs", text)
