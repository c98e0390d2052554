from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from engine_script import Fault, Script, log_prob_of
from scripted_engine import ScriptedEngine

from rollmill.config.engine import EngineConfig
from rollmill.engine.client import EngineClient
from rollmill.engine.errors import (
    EngineCallError,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    MalformedAnswer,
    WrongVersion,
)
from rollmill.engine.http import new_session
from rollmill.engine.types import FinishReason

PROMPT = [5, 6, 7]
Body = Callable[[ScriptedEngine, EngineClient], Coroutine[Any, Any, None]]


@asynccontextmanager
async def connected(
    script: Script, **config: Any
) -> AsyncIterator[tuple[ScriptedEngine, EngineClient]]:
    async with ScriptedEngine(script) as engine, new_session() as session:
        client = EngineClient(engine.url, EngineConfig(**config), session)
        try:
            yield engine, client
        finally:
            await client.close()


def run(script: Script, body: Body, **config: Any) -> None:
    async def main() -> None:
        async with connected(script, **config) as (engine, client):
            await body(engine, client)

    asyncio.run(main())


def limit(number: int) -> dict[str, Any]:
    return {"max_new_tokens": number}


def test_an_answer_has_one_log_prob_per_token_and_its_version() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        result = await client.generate("a", PROMPT, limit(20))
        assert result.finish is FinishReason.STOP
        assert result.num_tokens == 8
        assert result.token_ids.dtype == np.int32
        expected = [log_prob_of(token) for token in result.token_ids.tolist()]
        np.testing.assert_allclose(result.log_probs, expected, rtol=1e-6)
        assert result.versions == (4,)
        (segment,) = result.to_segments()
        assert segment.weight_version == 4
        assert segment.trainable
        assert result.counters.prompt_tokens == 3

    run(Script(length=8, version="4"), body)


def test_an_answer_cut_by_the_limit_says_so() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        result = await client.generate("a", PROMPT, limit(5))
        assert result.finish is FinishReason.LENGTH
        assert result.num_tokens == 5

    run(Script(length=8), body)


@pytest.mark.parametrize(
    "fault, error",
    [
        ("malformed_json", MalformedAnswer),
        ("missing_field", MalformedAnswer),
        ("missing_log_probs", MalformedAnswer),
        ("length_mismatch", MalformedAnswer),
        ("positive_log_prob", MalformedAnswer),
        ("bad_spans", MalformedAnswer),
        ("too_many_tokens", MalformedAnswer),
        ("unknown_finish", MalformedAnswer),
    ],
)
def test_a_broken_answer_is_an_error_that_says_what_was_expected(
    fault: str, error: type[EngineCallError]
) -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        with pytest.raises(error) as caught:
            await client.generate("a", PROMPT, limit(20))
        assert caught.value.expected
        assert caught.value.found
        assert engine.url in (caught.value.where or "")
        assert engine.counts["/generate"] == 1  # never sent again

    run(Script(faults=(Fault(fault),)), body)


def test_tokens_of_weights_older_than_allowed_are_an_error() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        with pytest.raises(WrongVersion, match="weight version 3 or later"):
            await client.generate("a", PROMPT, limit(20), oldest_version=3)
        assert (await client.generate("b", PROMPT, limit(20), oldest_version=2)).versions == (2,)

    run(Script(version="2"), body)


def test_the_initial_version_of_sglang_is_taken_only_when_none_is_expected() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        assert (await client.generate("a", PROMPT, limit(20))).versions == (0,)
        with pytest.raises(WrongVersion):
            await client.generate("b", PROMPT, limit(20), oldest_version=0)

    run(Script(version="default"), body)


def test_a_4xx_is_never_sent_again_and_shows_the_engines_words() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        with pytest.raises(EngineRefused, match="scripted 422"):
            await client.generate("a", PROMPT, limit(20))
        assert engine.counts["/generate"] == 1

    run(Script(faults=(Fault("http", status=422),)), body)


def test_a_500_is_not_sent_again() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        with pytest.raises(EngineFailed, match="HTTP 500"):
            await client.generate("a", PROMPT, limit(20))
        assert engine.counts["/generate"] == 1

    run(Script(faults=(Fault("http", status=500),)), body)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_engine_or_gateway_is_tried_again(status: int) -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        result = await client.generate("a", PROMPT, limit(20))
        assert result.num_tokens == 8
        assert engine.counts["/generate"] == 3

    run(Script(faults=(Fault("http", status=status, times=2),)), body)


def test_being_busy_for_long_is_no_failure_but_a_broken_connection_is() -> None:
    async def busy(engine: ScriptedEngine, client: EngineClient) -> None:
        assert (await client.generate("a", PROMPT, limit(20))).num_tokens == 8
        assert engine.counts["/generate"] == 3

    run(Script(faults=(Fault("http", status=429, times=2),)), busy, max_retries=0)

    async def broken(engine: ScriptedEngine, client: EngineClient) -> None:
        with pytest.raises(EngineUnreachable):
            await client.generate("a", PROMPT, limit(20))
        assert engine.counts["/generate"] == 1

    run(Script(faults=(Fault("cut"),)), broken, max_retries=0)


def test_a_cut_connection_is_tried_again_under_another_id() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        assert (await client.generate("a", PROMPT, limit(20))).num_tokens == 8
        first, second = [call.rid for call in engine.requests]
        assert first != second
        await client.close()
        assert f"abort:{first}" in engine.events

    run(Script(faults=(Fault("cut", nth=(0,)),)), body)


def test_the_deadline_ends_a_hanging_call_and_aborts_it() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        with pytest.raises(EngineTimeout, match="did not answer in time"):
            await client.generate("a", PROMPT, limit(20))
        await client.close()
        assert engine.events == ["abort:a;"]

    run(Script(faults=(Fault("hang"),)), body, request_timeout_s=0.2)


def test_cancelling_a_call_aborts_its_request() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        engine.hold()
        task = asyncio.create_task(client.generate("a", PROMPT, limit(20)))
        await engine.wait_for_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.num_in_flight == 0
        await client.close()
        assert engine.events == ["abort:a;"]

    run(Script(), body)


def test_an_abort_returns_what_was_written() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        task = asyncio.create_task(client.generate("a", PROMPT, limit(20)))
        await engine.wait_until(lambda: any(r.done == 3 for r in engine.running.values()))
        await client.abort("a")
        result = await task
        assert result.is_aborted
        assert result.num_tokens == 3

    run(Script(faults=(Fault("stall", after=3),)), body)


def test_aborting_one_request_leaves_another_whose_id_begins_alike() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        engine.hold()
        tasks = [asyncio.create_task(client.generate(r, PROMPT, limit(20))) for r in ("5", "51")]
        await engine.wait_for_running(2)
        await client.abort("5")
        assert (await tasks[0]).is_aborted
        engine.release()
        assert (await tasks[1]).finish is FinishReason.STOP

    run(Script(), body)


def test_an_abort_in_the_queue_gives_an_empty_answer() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        engine.hold()
        task = asyncio.create_task(client.generate("a", PROMPT, limit(20)))
        await engine.wait_for_running(1)
        await client.abort_all()
        result = await task
        assert result.is_aborted
        assert result.num_tokens == 0
        assert result.to_segments() == []

    run(Script(), body)


def test_a_weight_change_in_mid_answer_gives_one_segment_per_version(tmp_path: Any) -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        task = asyncio.create_task(client.generate("a", PROMPT, limit(60)))
        await engine.wait_for_running(1)
        await asyncio.wait([task], timeout=0.1)
        await client.pause("retract")
        await client.update_weights_from_disk(str(tmp_path), 1)
        await client.resume()
        result = await task
        assert result.versions == (0, 1)
        assert [s.weight_version for s in result.to_segments()] == [0, 1]
        assert sum(len(s) for s in result.to_segments()) == 50
        assert result.counters.retractions == 1

    run(Script(length=50, token_s=0.01), body)


def test_scoring_returns_the_log_probs_of_the_tokens_from_start() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        scores = await client.score([10, 11, 12, 13], 2)
        np.testing.assert_allclose(scores, [log_prob_of(12), log_prob_of(13)], rtol=1e-6)
        assert len(await client.score([10, 11], 1)) == 1
        with pytest.raises(ValueError, match="start"):
            await client.score([10, 11], 0)

    run(Script(), body)


def test_control_calls_reach_the_engine(tmp_path: Any) -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        await client.health(timeout_s=5)
        await client.pause("in_place")
        await client.update_weights_from_disk(str(tmp_path), 7)
        await client.resume()
        await client.flush_cache()
        await client.release_memory(["weights", "kv_cache"])
        await client.resume_memory(["weights"])
        assert (await client.model_info()).weight_version == "7"
        assert (await client.loads())[0].num_running_reqs == 0
        assert (await client.weights.sums()).total == "weights-7"
        assert engine.events == [
            "pause:in_place",
            "update:7",
            "continue",
            "flush",
            "release:weights,kv_cache",
            "resume:weights",
        ]

    run(Script(), body)


def test_a_failed_update_shows_the_engines_words(tmp_path: Any) -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        with pytest.raises(EngineRefused, match="Failed to get weights iterator"):
            await client.update_weights_from_disk(str(tmp_path / "nope"), 7)
        assert (await client.model_info()).weight_version == "0"

    run(Script(), body)


def test_the_session_id_is_sent_as_routing_key() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        await client.generate("a", PROMPT, limit(20), session_id="group-3")
        assert engine.requests[0].routing_key == "group-3"

    run(Script(), body)


def test_a_request_id_in_flight_cannot_be_used_again() -> None:
    async def body(engine: ScriptedEngine, client: EngineClient) -> None:
        engine.hold()
        task = asyncio.create_task(client.generate("a", PROMPT, limit(20)))
        await engine.wait_for_running(1)
        with pytest.raises(ValueError, match="in flight already"):
            await client.generate("a", PROMPT, limit(20))
        engine.release()
        await task

    run(Script(), body)
