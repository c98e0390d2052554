"""What every engine must do with /generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from conformance_helpers import streaming, until_running

from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineRefused
from rollmill.engine.http import new_session
from rollmill.engine.stream import StreamedAnswer
from rollmill.engine.types import FinishReason, GenerateResult

PROMPT = [5, 9, 12, 7, 33]
Answering = tuple[EngineClient, asyncio.Task[GenerateResult]]


def greedy(number: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": number, "temperature": 0.0, "ignore_eos": True, **more}


def sampled(number: int, seed: int, **more: Any) -> dict[str, Any]:
    return greedy(number, sampling_seed=seed, **more) | {"temperature": 1.0}


async def raw(client: EngineClient, body: Any) -> tuple[int, Any]:
    """A request that the client would not send."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with (
        new_session() as session,
        session.post(
            client.url + "/generate", data=data, headers={"Content-Type": "application/json"}
        ) as response,
    ):
        content = await response.read()
        return response.status, orjson.loads(content) if content else None


def test_an_answer_has_tokens_log_probs_a_version_and_counters(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        result = await client.generate("a", PROMPT, greedy(12))
        assert result.finish is FinishReason.LENGTH
        assert result.num_tokens == 12
        assert (result.log_probs <= 0).all()
        assert len(result.versions) == 1
        assert result.counters.prompt_tokens == len(PROMPT)

    run(body)


def test_greedy_answers_repeat_themselves(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        first = await client.generate("a", PROMPT, greedy(12))
        second = await client.generate("b", PROMPT, greedy(12))
        assert first.token_ids.tolist() == second.token_ids.tolist()
        top_1 = await client.generate("c", PROMPT, sampled(12, 3, top_k=1))
        assert top_1.token_ids.tolist() == first.token_ids.tolist()

    run(body)


def test_a_stop_token_ends_the_answer_and_is_part_of_it(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        ids = (await client.generate("a", PROMPT, greedy(12))).token_ids.tolist()
        stop = ids[4]
        options = greedy(12, stop_token_ids=[stop]) | {"ignore_eos": False}
        result = await client.generate("b", PROMPT, options)
        assert result.finish is FinishReason.STOP
        assert result.token_ids.tolist() == ids[: ids.index(stop) + 1]

    run(body)


def test_answers_with_one_seed_are_equal_and_with_others_differ(run: Any, target: Any) -> None:
    if not target.is_embedded:
        pytest.skip("SGLang promises this only with --enable-deterministic-inference")

    async def body(client: EngineClient) -> None:
        options = [sampled(20, seed) for seed in (1, 1, 2)]
        answers = await asyncio.gather(
            *(client.generate(str(i), PROMPT, o) for i, o in enumerate(options))
        )
        first, again, other = [answer.token_ids.tolist() for answer in answers]
        assert first == again
        assert first != other

    run(body)


def test_scores_of_an_answer_are_the_log_probs_it_came_with(run: Any, target: Any) -> None:
    async def body(client: EngineClient) -> None:
        result = await client.generate("a", PROMPT, sampled(20, 5))
        whole = [*PROMPT, *result.token_ids.tolist()]
        scores = await client.score(whole, len(PROMPT))
        np.testing.assert_allclose(scores, result.log_probs, atol=target.tolerance)

    run(body)


def test_log_probs_do_not_depend_on_who_shares_the_batch(run: Any, target: Any) -> None:
    async def body(client: EngineClient) -> None:
        prompts = [PROMPT[: 1 + i % 5] + [10 + i] * (i % 7) for i in range(12)]
        together = await asyncio.gather(
            *(client.generate(str(i), p, sampled(8 + i, i)) for i, p in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, together, strict=True):
            whole = [*prompt, *answer.token_ids.tolist()]
            alone = await client.score(whole, len(prompt))
            np.testing.assert_allclose(alone, answer.log_probs, atol=target.tolerance)

    run(body)


def test_an_answer_goes_on_from_any_prefix_of_itself(run: Any, target: Any) -> None:
    async def body(client: EngineClient) -> None:
        whole = await client.generate("a", PROMPT, greedy(16))
        ids = whole.token_ids.tolist()
        rest = await client.generate("b", PROMPT + ids[:6], greedy(10))
        np.testing.assert_allclose(rest.log_probs[0], whole.log_probs[6], atol=target.tolerance)
        if target.is_embedded:  # in bf16 a near tie may fall otherwise
            assert rest.token_ids.tolist() == ids[6:]

    run(body)


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": []},
        {"input_ids": None},
        {"input_ids": [5] * 200_000},
        {"sampling_params": {"top_p": 1.5}},
        {"sampling_params": {"temperature": -1.0}},
        {"sampling_params": {"no_such_parameter": 1}},
        {"sampling_params": {"max_new_tokens": -1}},
    ],
    ids=["no ids", "no input", "too long", "top_p", "temperature", "unknown", "negative"],
)
def test_a_wrong_request_is_refused_with_400_and_a_message(run: Any, change: Any) -> None:
    async def body(client: EngineClient) -> None:
        status, answer = await raw(client, {"input_ids": PROMPT} | change)
        assert status == 400
        assert "error" in answer or answer.get("object") == "error"
        await client.generate("after", PROMPT, greedy(2))  # still well

    run(body)


def test_a_body_that_is_not_json_is_refused_with_400(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        assert (await raw(client, b'{"input_ids": [1,2'))[0] == 400

    run(body)


def test_a_request_id_in_flight_is_refused(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        task = asyncio.create_task(client.generate("same", PROMPT, greedy(600)))
        await until_running(client, 1)
        request = {"rid": "same;", "input_ids": PROMPT, "sampling_params": greedy(2)}
        status, answer = await raw(client, request)
        assert status == 400
        assert "Duplicate request ID" in answer["error"]["message"]
        await client.abort("same")
        await task

    run(body)


def test_the_client_reports_a_refusal_with_the_engines_words(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        with pytest.raises(EngineRefused, match="top_p"):
            await client.generate("a", PROMPT, greedy(2, top_p=1.5))

    run(body)


def test_a_batch_is_answered_in_order(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        single = [await client.generate(str(i), [5 + i, 9], greedy(5)) for i in range(3)]
        ids = [[5 + i, 9] for i in range(3)]
        status, answers = await raw(client, {"input_ids": ids, "sampling_params": greedy(5)})
        assert status == 200
        assert [a["output_ids"] for a in answers] == [r.token_ids.tolist() for r in single]

    run(body)


def test_a_stream_is_cumulative_and_ends_with_done(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        request = {"input_ids": PROMPT, "sampling_params": greedy(8), "stream": True}
        async with (
            new_session() as session,
            session.post(client.url + "/generate", json=request) as response,
        ):
            text = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        chunks = [orjson.loads(line) for line in lines[:-1]]
        lengths = [len(chunk["output_ids"]) for chunk in chunks]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 8
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"

    run(body)


@pytest.mark.parametrize("interval", [1, 4, 50])
def test_a_streamed_answer_equals_the_one_that_comes_whole(
    run: Any, target: Any, interval: int
) -> None:
    async def body(client: EngineClient) -> None:
        async with streaming(client.url, interval) as streamer:
            for number, params in enumerate((greedy(1), greedy(13), greedy(20))):
                whole = await client.generate(f"w{number}", PROMPT, params)
                # SGLang aborts the id of a stream once more, 2 s after its end
                rid = f"every {interval}, number {number}"
                result = await streamer.generate(rid, PROMPT, params)
                assert result.token_ids.tolist() == whole.token_ids.tolist()
                np.testing.assert_allclose(result.log_probs, whole.log_probs, atol=target.tolerance)
                assert result.spans == whole.spans
                assert result.finish is whole.finish
                assert result.counters.prompt_tokens == whole.counters.prompt_tokens
                assert result.text in ("", whole.text)

    run(body)


@asynccontextmanager
async def half_way(
    client: EngineClient, rid: str, pieces: StreamedAnswer
) -> AsyncIterator[Answering]:
    """A request of which some tokens have been streamed, on an engine that is slow until the end of
    the context."""
    await client._post("/slow_down", {"forward_sleep_time": 0.02})
    try:
        async with streaming(client.url, 4) as streamer:
            call = asyncio.create_task(streamer.generate(rid, PROMPT, greedy(200), streamed=pieces))
            while pieces.num_tokens < 9:
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0.005))])
            yield streamer, call
    finally:
        await client._post("/slow_down", {"forward_sleep_time": 0.0})


def test_what_has_arrived_of_a_stream_is_the_beginning_of_the_answer(run: Any, target: Any) -> None:
    """The caller goes away in mid-answer; the tokens until then are whole, and a second request
    goes on from them."""

    async def body(client: EngineClient) -> None:
        whole = await client.generate("w", PROMPT, greedy(200))
        pieces = StreamedAnswer("here")
        async with half_way(client, "left", pieces) as (_, call):
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        part = pieces.kept(max_new_tokens=200, oldest_version=None)
        assert part is not None
        check_beginning(part, whole, target.tolerance)
        number = part.num_tokens
        rest = await client.generate("r", [*PROMPT, *part.token_ids.tolist()], greedy(1))
        np.testing.assert_allclose(
            rest.log_probs[0], whole.log_probs[number], atol=target.tolerance
        )

    run(body)


def test_a_stream_that_is_aborted_in_a_pause_has_its_tokens(run: Any, target: Any) -> None:
    async def body(client: EngineClient) -> None:
        whole = await client.generate("w", PROMPT, greedy(200))
        async with half_way(client, "paused", StreamedAnswer("here")) as (streamer, call):
            await client.pause("retract")
            await streamer.abort("paused")
            result = await call
        check_beginning(result, whole, target.tolerance)

    run(body)


def check_beginning(part: GenerateResult, whole: GenerateResult, tolerance: float) -> None:
    number = part.num_tokens
    assert part.is_aborted
    assert 9 <= number < whole.num_tokens
    assert part.token_ids.tolist() == whole.token_ids.tolist()[:number]
    np.testing.assert_allclose(part.log_probs, whole.log_probs[:number], atol=tolerance)
    assert part.versions == whole.versions
