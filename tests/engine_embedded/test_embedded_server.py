"""The embedded engine over HTTP: `/generate`, abort, pause, errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from embedded_helpers import EOS, plain_logprobs, post, refused, serving
from transformers import AutoModelForCausalLM

from rollmill.engine.embedded.state import STATE

PROMPT = [5, 9, 23, 40, 8, 8, 31]
LONG = {"max_new_tokens": 400, "ignore_eos": True}


async def events(response: Any) -> list[Any]:
    lines = [line async for line in response.content if line.strip()]
    assert lines[-1] == b"data: [DONE]\n"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def test_greedy_answer_has_the_recorded_shape(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            body = {
                "input_ids": PROMPT,
                "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
                "return_logprob": True,
            }
            answer = await post(client, "/generate", body)
        meta = answer["meta_info"]
        assert len(answer["output_ids"]) == 6
        assert isinstance(answer["text"], str)
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert meta["prompt_tokens"] == 7
        assert meta["completion_tokens"] == 6
        assert meta["weight_version"] == "v0"
        assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 6}]
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs_length"] == 6
        model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
        expected = plain_logprobs(model, PROMPT + answer["output_ids"])[6:]
        found = meta["output_token_logprobs"]
        assert [t for _, t, _ in found] == answer["output_ids"]
        assert [lp for lp, _, _ in found] == pytest.approx(expected, abs=1e-4)

    asyncio.run(run())


def test_logprobs_are_those_of_the_scaled_softmax(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            body = {
                "input_ids": PROMPT,
                "sampling_params": {"max_new_tokens": 9, "temperature": 0.5, "top_k": 3},
                "return_logprob": True,
            }
            answer = await post(client, "/generate", body)
        model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
        expected = plain_logprobs(model, PROMPT + answer["output_ids"], temperature=0.5)[6:]
        found = [lp for lp, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(expected, abs=1e-4)

    asyncio.run(run())


def test_prompt_logprobs_without_new_tokens(llama_folder: Path) -> None:
    async def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
        expected = plain_logprobs(model, PROMPT)
        async with serving(llama_folder, chunked_prefill_tokens=2) as client:
            for start in (0, 3, 6):
                body = {
                    "input_ids": PROMPT,
                    "sampling_params": {"max_new_tokens": 0},
                    "return_logprob": True,
                    "logprob_start_len": start,
                    "return_text_in_logprobs": True,
                    "top_logprobs_num": 2,
                    "token_ids_logprob": [4, 5],
                }
                meta = (await post(client, "/generate", body))["meta_info"]
                found = meta["input_token_logprobs"]
                assert found[0] == [None, PROMPT[start], found[0][2]]
                assert [t for _, t, _ in found] == PROMPT[start:]
                values = [lp for lp, _, _ in found[1:]]
                assert values == pytest.approx(expected[start:], abs=1e-4)
                assert len(meta["input_top_logprobs"]) == len(found)
                assert len(meta["input_token_ids_logprobs"]) == len(found)
                assert meta["finish_reason"] == {"type": "length", "length": 0}
                assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 0}]

    asyncio.run(run())


def test_batch_and_samples_come_in_input_order(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            body = {
                "rid": "x",
                "input_ids": [PROMPT, [7, 8]],
                "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 2}],
                "return_logprob": [True, False],
            }
            first, second = await post(client, "/generate", body)
            assert [first["meta_info"]["id"], second["meta_info"]["id"]] == ["x_0", "x_1"]
            assert "output_token_logprobs" in first["meta_info"]
            assert "output_token_logprobs" not in second["meta_info"]
            body = {
                "input_ids": [PROMPT, [7, 8]],
                "sampling_params": {"n": 3, "max_new_tokens": 8, "sampling_seed": 4},
            }
            answers = await post(client, "/generate", body)
            assert [a["meta_info"]["prompt_tokens"] for a in answers] == [7] * 3 + [2] * 3
            assert len({tuple(a["output_ids"]) for a in answers[:3]}) == 3

    asyncio.run(run())


def test_seed_fixes_the_text_whatever_else_runs(llama_folder: Path) -> None:
    async def run() -> None:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 20, "sampling_seed": 11, "ignore_eos": True},
        }
        other = {"input_ids": [3, 4, 5, 6], "sampling_params": {"max_new_tokens": 25}}
        async with serving(llama_folder) as client:
            alone = await post(client, "/generate", body)
            crowd = await asyncio.gather(
                post(client, "/generate", body),
                *(post(client, "/generate", other) for _ in range(5)),
            )
        assert alone["output_ids"] == crowd[0]["output_ids"]

    asyncio.run(run())


def test_unseeded_requests_differ(llama_folder: Path) -> None:
    async def run() -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20}}
        async with serving(llama_folder) as client:
            answers = [await post(client, "/generate", body) for _ in range(3)]
        assert len({tuple(a["output_ids"]) for a in answers}) == 3

    asyncio.run(run())


def test_text_prompt_and_stop_string(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            params = {"max_new_tokens": 40, "temperature": 1.0, "sampling_seed": 1}
            body = {"text": "abc 12", "sampling_params": params | {"ignore_eos": True}}
            free = await post(client, "/generate", body)
            assert free["meta_info"]["prompt_tokens"] == 6
            stop = free["text"][10:12]
            body["sampling_params"]["stop"] = [stop]
            stopped = await post(client, "/generate", body)
            assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            assert stopped["text"] == free["text"][: free["text"].index(stop)]
            count = free["text"].index(stop) + len(stop)
            assert stopped["output_ids"] == free["output_ids"][:count]
            body["sampling_params"]["no_stop_trim"] = True
            kept = await post(client, "/generate", body)
            assert kept["text"] == stopped["text"] + stop

    asyncio.run(run())


def test_stop_token_is_in_the_ids_but_not_in_the_text(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            params: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
            free = await post(client, "/generate", {"input_ids": PROMPT, "sampling_params": params})
            token = free["output_ids"][4]
            params["stop_token_ids"] = [token]
            body = {"input_ids": PROMPT, "sampling_params": params}
            stopped = await post(client, "/generate", body)
            count = free["output_ids"].index(token) + 1
            assert stopped["output_ids"] == free["output_ids"][:count]
            assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
            assert len(stopped["text"]) == count - 1
            params = {"max_new_tokens": 5, "logit_bias": {str(EOS): 100.0}}
            ended = await post(
                client, "/generate", {"input_ids": PROMPT, "sampling_params": params}
            )
            assert ended["output_ids"] == [EOS]
            assert ended["text"] == ""
            params["min_new_tokens"] = 2
            ended = await post(
                client, "/generate", {"input_ids": PROMPT, "sampling_params": params}
            )
            assert len(ended["output_ids"]) == 3

    asyncio.run(run())


def test_stream_is_cumulative_and_keeps_its_interval(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            params = {"max_new_tokens": 12, "ignore_eos": True, "stream_interval": 4}
            body = {
                "input_ids": PROMPT,
                "sampling_params": params,
                "stream": True,
                "return_logprob": True,
            }
            async with client.post("/generate", json=body) as response:
                assert response.headers["Content-Type"].startswith("text/event-stream")
                chunks = await events(response)
            assert [len(c["output_ids"]) for c in chunks] == [1, 5, 9, 12]
            assert [len(c["meta_info"]["output_token_logprobs"]) for c in chunks] == [1, 5, 9, 12]
            assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None] * 3
            assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
            assert chunks[-1]["output_ids"][:9] == chunks[2]["output_ids"]
            body["sampling_params"] = {"max_new_tokens": 3, "ignore_eos": True, "n": 2}
            async with client.post("/generate", json=body) as response:
                chunks = await events(response)
            assert sorted(c["index"] for c in chunks) == [0, 0, 0, 1, 1, 1]

    asyncio.run(run())


def test_abort_returns_what_was_written(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.01})
            body = {
                "rid": "long",
                "input_ids": PROMPT,
                "sampling_params": LONG,
                "return_logprob": True,
            }
            task = asyncio.ensure_future(post(client, "/generate", body))
            await until_running(client, 1)
            assert (await client.post("/abort_request", json={"rid": "unknown"})).status == 200
            assert "Duplicate" in (await refused(client, "/generate", body))["error"]["message"]
            assert (await client.post("/abort_request", json={"rid": "long"})).status == 200
            answer = await task
            meta = answer["meta_info"]
            assert meta["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            count = len(answer["output_ids"])
            assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == count < 400
            assert meta["weight_versions"][-1]["end"] == count

    asyncio.run(run())


def test_a_stream_in_increments_adds_up_to_the_answer(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            params = {"max_new_tokens": 12, "ignore_eos": True, "stream_interval": 4}
            body: dict[str, Any] = {
                "input_ids": PROMPT,
                "sampling_params": params | {"sampling_seed": 3},
                "return_logprob": True,
                "top_logprobs_num": 2,
            }
            whole = await post(client, "/generate", body)
            body |= {"stream": True, "incremental_streaming_output": True}
            async with client.post("/generate", json=body) as response:
                pieces = await events(response)
        metas = [piece["meta_info"] for piece in pieces]
        assert [meta["completion_tokens"] for meta in metas] == [1, 5, 9, 12]
        assert [len(piece["output_ids"]) for piece in pieces] == [1, 4, 4, 3]
        assert [i for piece in pieces for i in piece["output_ids"]] == whole["output_ids"]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert [entry for meta in metas for entry in meta[name]] == whole["meta_info"][name]
        assert [meta["weight_versions"] for meta in metas] == [
            [{"version": "v0", "start": 0, "end": end}] for end in (1, 5, 9, 12)
        ]
        assert [meta["finish_reason"] for meta in metas[:-1]] == [None] * 3

    asyncio.run(run())


def test_random_numbers_go_on_after_an_offset(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            params = {"max_new_tokens": 20, "sampling_seed": 11, "ignore_eos": True}
            body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": params}
            whole = (await post(client, "/generate", body))["output_ids"]
            rest = body | {
                "input_ids": PROMPT + whole[:8],
                "sampling_params": params | {"max_new_tokens": 12},
            }
            gone_on = await post(client, "/generate", rest | {"sampling_offset": 8})
            assert gone_on["output_ids"] == whole[8:]
            assert (await post(client, "/generate", rest))["output_ids"] != whole[8:]
            await refused(client, "/generate", rest | {"sampling_offset": -1})
            await refused(client, "/generate", rest | {"sampling_offset": len(PROMPT) + 9})

    asyncio.run(run())


def test_abort_all_ends_streams_and_batches(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder, max_running_requests=2) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.01})
            body = {"input_ids": [PROMPT] * 3, "sampling_params": LONG}
            batch = asyncio.ensure_future(post(client, "/generate", body))
            await until_running(client, 2)
            stream = await client.post("/generate", json=body | {"stream": True})
            await client.post("/abort_request", json={"abort_all": True})
            answers = await batch
            reasons = [a["meta_info"]["finish_reason"]["message"] for a in answers]
            assert reasons == ["Aborted", "Aborted", "Abort in waiting queue"]
            chunks = await events(stream)
            assert {c["meta_info"]["finish_reason"]["type"] for c in chunks[-3:]} == {"abort"}

    asyncio.run(run())


def test_a_client_that_leaves_aborts_its_request(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.01})
            for stream in (False, True):
                async with ClientSession() as session:
                    body = {"input_ids": PROMPT, "sampling_params": LONG, "stream": stream}
                    task = asyncio.ensure_future(
                        session.post(client.make_url("/generate"), json=body)
                    )
                    await until_running(client, 1)
                    task.cancel()
                await until_running(client, 0)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_keeps_work_and_holds_new_requests(mode: str, llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.002})
            params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": PROMPT, "sampling_params": params}
            reference = await post(client, "/generate", body)
            task = asyncio.ensure_future(post(client, "/generate", body))
            await until_running(client, 1)
            paused = await post(client, "/pause_generation", {"mode": mode})
            assert paused == {"message": "Generation paused successfully.", "status": "ok"}
            flushed = await client.post("/flush_cache")
            assert flushed.status == (200 if mode == "retract" else 400)
            held = asyncio.ensure_future(post(client, "/generate", body))
            assert (await client.get("/health")).status == 200
            assert not task.done()
            assert not held.done()
            await post(client, "/continue_generation", {})
            answer, later = await task, await held
            assert answer["output_ids"] == later["output_ids"] == reference["output_ids"]
            assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)

    asyncio.run(run())


def test_pause_by_abort_ends_running_work(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.01})
            body = {"input_ids": PROMPT, "sampling_params": LONG}
            task = asyncio.ensure_future(post(client, "/generate", body))
            await until_running(client, 1)
            await post(client, "/pause_generation", {})
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
            short = {"rid": "h", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
            held = asyncio.ensure_future(post(client, "/generate", short))
            await until_waiting(client, 1)
            await client.post("/abort_request", json={"rid": "h"})
            reason = (await held)["meta_info"]["finish_reason"]
            assert reason["message"] == "Abort in waiting queue"
            await post(client, "/continue_generation", {})

    asyncio.run(run())


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "Either text, input_ids"),
    ({"input_ids": []}, "cannot be empty"),
    ({"input_ids": [[5], []]}, "cannot be empty"),
    ({"input_ids": [5, 64]}, "outside the vocabulary"),
    ({"input_ids": [5, -1]}, "outside the vocabulary"),
    ({"input_ids": [5] * 600}, "longer than the model's context length"),
    ({"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 99}}, "total of 599 tokens"),
    ({"input_ids": [5], "text": "a"}, "Only one of"),
    ({"input_ids": [5], "sampling_params": {"top_p": 1.5}}, "top_p must be in (0, 1], got 1.5."),
    ({"input_ids": [5], "sampling_params": {"top_k": 0}}, "top_k must be"),
    ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "non-negative"),
    ({"input_ids": [5], "sampling_params": {"regex": "a+"}}, "not supported"),
    ({"input_ids": [[5], [6]], "rid": ["d", "d"]}, "Duplicate request IDs"),
    ({"input_ids": [5], "lora_path": "x"}, "not supported"),
    ({"input_ids": [5], "return_logprob": True, "logprob_start_len": 5}, "logprob_start_len"),
]


def test_impossible_requests_are_refused_with_a_reason(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            for body, message in BAD:
                assert message in (await refused(client, "/generate", body))["error"]["message"]
            body = {"input_ids": [5], "sampling_params": {"max_tokens": 5}}
            error = (await refused(client, "/generate", body))["error"]
            assert error.startswith("unknown field `max_tokens`, expected one of")
            wrong_type = await refused(client, "/generate", {"input_ids": "abc"})
            assert wrong_type["object"] == "error"
            assert wrong_type["type"] == "Bad Request"
            async with client.post("/generate", data=b'{"input_ids": [1,2') as response:
                assert response.status == 400
            body = {"input_ids": [5], "sampling_params": {"top_p": 1.5}, "stream": True}
            async with client.post("/generate", json=body) as response:
                assert response.status == 200
                (chunk,) = await events(response)
            assert chunk["error"]["code"] == 400
            assert (await (await client.get("/nowhere")).json()) == {"detail": "Not Found"}
            response = await client.get("/generate")
            assert response.status == 405
            assert await response.json() == {"detail": "Method Not Allowed"}
            assert (await refused(client, "/pause_generation", {"mode": "keep"}))["code"] == 400
            await refused(client, "/resume_memory_occupation", {"tags": ["kv_cache"]})
            await post(client, "/generate", {"input_ids": [5], "bogus": 1})

    asyncio.run(run())


def test_a_request_that_can_never_fit_is_refused(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder, max_total_tokens=600) as client:
            error = await refused(client, "/generate", {"input_ids": [5] * 180})
            assert "KV cache" in error["error"]["message"]
            await post(client, "/generate", {"input_ids": [5] * 20, "sampling_params": {"n": 6}})

    asyncio.run(run())


def test_memory_is_released_and_taken_back(llama_folder: Path) -> None:
    async def run() -> None:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        }
        async with serving(llama_folder) as client:
            before = await post(client, "/generate", body)
            tags = {"tags": ["weights", "kv_cache"]}
            assert await post(client, "/release_memory_occupation", tags) is None
            held = asyncio.ensure_future(post(client, "/generate", body))
            await until_waiting(client, 1)
            assert await post(client, "/resume_memory_occupation", tags) is None
            assert (await held)["output_ids"] == before["output_ids"]
            assert (await held)["meta_info"]["cached_tokens"] == 0

    asyncio.run(run())


def test_health_and_info(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            for path in ("/health", "/health_generate", "/ready", "/ping"):
                response = await client.get(path)
                assert (response.status, await response.text()) == (200, "")
            info = await (await client.get("/get_model_info")).json()
            assert info["weight_version"] == "v0"
            assert info["architectures"] == ["LlamaForCausalLM"]
            info = await (await client.get("/server_info")).json()
            assert info["context_length"] == 512
            assert info["max_running_requests"] == 64
            load = (await (await client.get("/v1/loads")).json())["loads"][0]
            assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0

    asyncio.run(run())


async def until_running(client: Any, count: int) -> None:
    """Wait until that many requests are being written: each has its first token."""
    await _until(client, "num_running_reqs", count)
    scheduler = client.server.app[STATE].engine.scheduler
    async with asyncio.timeout(20):
        while sum(bool(one.output) for one in list(scheduler.running)) < count:
            await client.get("/ping")


async def until_waiting(client: Any, count: int) -> None:
    await _until(client, "num_waiting_reqs", count)


async def _until(client: Any, key: str, count: int) -> None:
    async with asyncio.timeout(20):
        while (await (await client.get("/v1/loads")).json())["loads"][0][key] != count:
            pass


@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_special_token_may_be_a_stop_string(llama_folder: Path, is_skipped: bool) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            params = {
                **LONG,
                "stop": ["<eos>"],
                "logit_bias": {str(EOS): 6.0},
                "skip_special_tokens": is_skipped,
                "sampling_seed": 3,
            }
            body = {"input_ids": PROMPT, "sampling_params": params}
            answer = await post(client, "/generate", body)
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "<eos>"}
            assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
            assert "<eos>" not in answer["text"]

    asyncio.run(run())


def test_a_client_that_leaves_a_stream_is_no_error(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            params = LONG | {"n": 16}
            body = {"input_ids": PROMPT, "sampling_params": params, "stream": True}

            async def leave_early(num_lines: int) -> None:
                async with ClientSession() as session:
                    response = await session.post(client.make_url("/generate"), json=body)
                    for _ in range(num_lines):
                        await response.content.readline()
                    response.close()

            await asyncio.gather(*(leave_early(number) for number in range(1, 40)))
            await until_running(client, 0)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_the_cache_saved_is_counted_once_per_request(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
            await post(client, "/generate", body)
            await post(client, "/slow_down", {"forward_sleep_time": 0.1})
            task = asyncio.ensure_future(
                post(client, "/generate", {"input_ids": PROMPT, "sampling_params": LONG})
            )
            for _ in range(3):
                await until_running(client, 1)
                await post(client, "/pause_generation", {"mode": "retract"})
                await post(client, "/continue_generation", {})
            await until_running(client, 1)
            await post(client, "/pause_generation", {"mode": "abort"})
            answer = await task
            assert answer["meta_info"]["num_retractions"] == 3
            async with client.get("/v1/loads") as response:
                (load,) = (await response.json())["loads"]
            saved = answer["meta_info"]["cached_tokens"]
            assert load["cache_hit_rate"] == saved / (2 * len(PROMPT)) < 1

    asyncio.run(run())
