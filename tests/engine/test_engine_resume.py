"""Answers that go on on another engine from the tokens that a lost one had written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import Call, Fault, FaultKind, Pieces, Script, log_prob_of
from scripted_engine import ScriptedEngine
from test_engine_pool import Body, ask, run, until

from rollmill.config.engine import EngineConfig
from rollmill.engine.errors import EngineFailed, EngineRefused
from rollmill.engine.pool import EnginePool
from rollmill.engine.resume import Unfinished
from rollmill.engine.types import FinishReason, GenerateResult, VersionSpan
from rollmill.sample import EngineCounters, float_array, int_array

PROMPT = [5, 6, 7]
TOTAL = 40
EXPECTED = [100 + position for position in range(len(PROMPT), len(PROMPT) + TOTAL)]


def by_position(**more: Any) -> Script:
    """An engine whose tokens depend on their position alone, as a model's do on the context."""
    end = len(PROMPT) + TOTAL

    def tokens(call: Call, number: int) -> list[int]:
        return [100 + len(call.input_ids) + i for i in range(number)]

    return Script(length=lambda call: end - len(call.input_ids), tokens=tokens, **more)


def run_streamed(
    scripts: Script | list[Script], tmp_path: Path, body: Body, *, interval: int = 3, **config: Any
) -> None:
    run(scripts, tmp_path, body, stream_interval=interval, **config)


def check_whole(result: GenerateResult) -> None:
    assert result.token_ids.tolist() == EXPECTED
    assert result.finish is FinishReason.STOP
    np.testing.assert_allclose(result.log_probs, [log_prob_of(t) for t in EXPECTED], rtol=1e-6)


@pytest.mark.parametrize("pieces", list(Pieces))
def test_a_streamed_answer_is_the_answer(tmp_path: Path, pieces: Pieces) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        result = await ask(pool, "a")
        check_whole(result)
        assert result.spans == (VersionSpan(0, 0, TOTAL),)
        assert result.counters == EngineCounters(num_calls=1, prompt_tokens=len(PROMPT))

    run_streamed(by_position(pieces=pieces), tmp_path, body)


@pytest.mark.parametrize("pieces", list(Pieces))
def test_tokens_before_a_cut_are_kept(tmp_path: Path, pieces: Pieces) -> None:
    """17 tokens are written; pieces end after 1, 4, 7, 10, 13 and 16."""

    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        result = await ask(pool, "a")
        check_whole(result)
        assert result.spans == (VersionSpan(0, 0, TOTAL),)
        second = engines[0].requests[1]
        assert list(second.input_ids) == PROMPT + EXPECTED[:16]
        assert second.max_new_tokens == 50 - 16
        assert second.rid != engines[0].requests[0].rid
        assert not second.rid.startswith(engines[0].requests[0].rid)
        assert result.counters == EngineCounters(num_calls=1, prompt_tokens=2 * len(PROMPT) + 16)
        assert (pool.stats().num_redispatched, pool.stats().num_kept_tokens) == (1, 16)

    cut = Fault(FaultKind.CUT, nth=(0,), after=17)
    run_streamed(by_position(pieces=pieces, faults=(cut,)), tmp_path, body)


def test_an_answer_may_be_cut_several_times(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        check_whole(await ask(pool, "a"))
        assert [len(call.input_ids) - len(PROMPT) for call in engines[0].requests] == [0, 4, 11]

    cuts = Fault(FaultKind.CUT, nth=(0,), after=4), Fault(FaultKind.CUT, nth=(1,), after=7)
    run_streamed(by_position(faults=cuts), tmp_path, body)


def test_tokens_of_a_hung_engine_are_kept(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        tasks = [ask(pool, str(i)) for i in range(4)]
        hung = engines[0]
        await hung.wait_for_running(2)
        hung.answers_health = False
        for task in tasks:
            check_whole(await task)
        assert pool.stats().num_kept_tokens == 2 * 10
        assert sorted(len(call.input_ids) for call in engines[1].requests) == [3, 3, 13, 13]

    stalls = by_position(faults=(Fault(FaultKind.STALL, after=10),))
    run_streamed([stalls, by_position()], tmp_path, body, health_strikes=2)


def test_versions_of_what_was_kept_stay_what_they_were(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        writer, other = engines
        task = ask(pool, "a")
        await writer.wait_until(lambda: any(r.done >= 10 for r in writer.running.values()))
        await pool.update_weights(str(tmp_path), 1)
        await writer.stop()
        result = await task
        check_whole(result)
        assert [span.version for span in result.spans] == [0, 1]
        assert result.spans[0].end == 10
        assert len(other.requests[0].input_ids) == len(PROMPT) + 10

    stalls = by_position(faults=(Fault(FaultKind.STALL, nth=(0,), after=10),))
    run_streamed([stalls, by_position()], tmp_path, body, max_retries=1)


def test_an_abort_after_a_cut_returns_what_was_kept(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        task = ask(pool, "a")
        engine = engines[0]
        await engine.wait_until(lambda: any(r.done >= 10 for r in engine.running.values()))
        await engine.stop()
        await until(pool, lambda: pool.stats().num_kept_tokens == 10)
        await pool.abort_all(2.0)
        result = await task
        assert result.is_aborted
        assert result.token_ids.tolist() == EXPECTED[:10]

    stalls = by_position(faults=(Fault(FaultKind.STALL, after=10),))
    run_streamed(stalls, tmp_path, body)


def test_a_request_that_was_sent_again_is_found_and_aborted_by_its_own_id(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        writer, other = engines
        task = ask(pool, "a")
        await writer.wait_until(lambda: any(r.done >= 10 for r in writer.running.values()))
        await writer.stop()
        await other.wait_for_running(1)
        assert pool.engine_of("a") == other.url
        report = await pool.abort("a", 5.0)
        assert (report.num_aborted, report.num_unanswered) == (1, 0)
        assert (await task).is_aborted

    stalls = by_position(faults=(Fault(FaultKind.STALL, after=10),))
    run_streamed([stalls, stalls], tmp_path, body, max_retries=1)


def test_an_abort_of_a_stream_returns_all_of_its_tokens(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        task = ask(pool, "a")
        engine = engines[0]
        await engine.wait_until(lambda: any(r.done >= 12 for r in engine.running.values()))
        await pool.abort_all(2.0)
        result = await task
        assert result.is_aborted
        assert result.token_ids.tolist() == EXPECTED[:12]

    run_streamed(by_position(faults=(Fault(FaultKind.STALL, after=12),)), tmp_path, body)


@pytest.mark.parametrize(("status", "error"), [(400, EngineRefused), (500, EngineFailed)])
def test_an_error_inside_a_stream_is_one_like_any_other(
    tmp_path: Path, status: int, error: type[Exception]
) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        with pytest.raises(error, match=f"scripted {status}"):
            await ask(pool, "a")
        assert len(engines[0].requests) == 1

    failing = Fault(FaultKind.STREAM_ERROR, nth=(0,), after=4, status=status)
    run_streamed(by_position(faults=(failing,)), tmp_path, body)


def test_a_busy_answer_inside_a_stream_is_waited_for(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        check_whole(await ask(pool, "a"))
        assert len(engines[0].requests) == 2

    busy = Fault(FaultKind.STREAM_ERROR, nth=(0,), after=0, status=503)
    run_streamed(by_position(faults=(busy,)), tmp_path, body)


def test_rules_that_look_back_have_the_request_start_afresh(tmp_path: Path) -> None:
    async def body(engines: list[ScriptedEngine], pool: EnginePool) -> None:
        result = await pool.generate("a", PROMPT, {"max_new_tokens": 50, "stop": ["END"]})
        check_whole(result)
        assert [len(call.input_ids) for call in engines[0].requests] == [3, 3]
        assert pool.stats().num_kept_tokens == 0

    cut = Fault(FaultKind.CUT, nth=(0,), after=17)
    run_streamed(by_position(faults=(cut,)), tmp_path, body)


@pytest.mark.parametrize(
    ("sampling", "can_go_on"),
    [
        ({}, True),
        ({"stop": [], "frequency_penalty": 0.0, "repetition_penalty": 1.0, "regex": None}, True),
        ({"temperature": 0.7, "stop_token_ids": [4], "logit_bias": {"3": 1.0}}, True),
        ({"stop": "x"}, False),
        ({"presence_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"json_schema": "{}"}, False),
    ],
)
def test_which_requests_may_go_on(sampling: dict[str, Any], can_go_on: bool) -> None:
    assert Unfinished(int_array(PROMPT), sampling).can_go_on is can_go_on


def part(version: int, *tokens: int) -> GenerateResult:
    return GenerateResult(
        int_array(tokens),
        float_array([-0.5] * len(tokens)),
        (VersionSpan(version, 0, len(tokens)),),
        FinishReason.ABORT,
        counters=EngineCounters(num_calls=1, prompt_tokens=3, cached_tokens=2),
    )


def test_what_is_left_after_some_tokens() -> None:
    sampling = {"max_new_tokens": 9, "min_new_tokens": 5, "sampling_seed": 8}
    work = Unfinished(int_array(PROMPT), sampling)
    assert (work.num_before, work.cost, work.sampling_left()) == (0, 12, sampling)
    work.keep(part(4, 20, 21))
    work.keep(part(5, 22))
    assert (work.num_before, work.cost, work.num_left) == (3, 12, 6)
    assert work.context().tolist() == [*PROMPT, 20, 21, 22]
    expected = {"max_new_tokens": 6, "min_new_tokens": 2, "sampling_seed": 8}
    assert work.sampling_left() == expected
    whole = work.finish(part(5, 23, 24))
    assert whole.token_ids.tolist() == [20, 21, 22, 23, 24]
    assert whole.spans == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 5))
    assert whole.counters == EngineCounters(num_calls=1, prompt_tokens=9, cached_tokens=6)
    assert work.finish_at_limit().finish is FinishReason.LENGTH


def test_the_router_cannot_carry_streams() -> None:
    with pytest.raises(ValueError, match=r"engine\.stream_interval: the SGLang router"):
        EngineConfig(router="sglang", stream_interval=4)
