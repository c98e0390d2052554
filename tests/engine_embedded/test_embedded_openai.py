"""OpenAI-compatible routes, tokens and metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from embedded_helpers import post, refused, serving

GREEDY = {"temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hi"}]


async def chunks_of(client: Any, path: str, body: Any) -> list[Any]:
    async with client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        lines = [line async for line in response.content if line.strip()]
    assert lines[-1] == b"data: [DONE]\n"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def test_completions_agree_with_generate(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            native = {"text": "abc", "sampling_params": GREEDY | {"max_new_tokens": 7}}
            expected = await post(client, "/generate", native)
            body = {"model": "m", "prompt": "abc", "max_tokens": 7, "logprobs": 2} | GREEDY
            answer = await post(client, "/v1/completions", body)
            (choice,) = answer["choices"]
            assert choice["text"] == expected["text"]
            assert choice["finish_reason"] == "length"
            assert choice["matched_stop"] is None
            assert "".join(choice["logprobs"]["tokens"]) == expected["text"]
            assert len(choice["logprobs"]["top_logprobs"][0]) == 2
            assert answer["object"] == "text_completion"
            assert answer["model"] == "m"
            assert answer["usage"]["prompt_tokens"] == 3
            assert answer["usage"]["total_tokens"] == 10
            assert answer["metadata"]["weight_versions"] == [
                {"version": "v0", "start": 0, "end": 7}
            ]
            body["prompt"] = [12, 13, 14]
            answer = await post(client, "/v1/completions", body)
            assert answer["choices"][0]["text"] == expected["text"]
            body["prompt"] = ["abc", "12"]
            answer = await post(client, "/v1/completions", body | {"n": 2})
            assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
            assert answer["usage"]["prompt_tokens"] == 5

    asyncio.run(run())


def test_chat_renders_the_template(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            native = {
                "text": "user:hi assistant:",
                "sampling_params": GREEDY | {"max_new_tokens": 6},
            }
            expected = await post(client, "/generate", native)
            body = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
            answer = await post(client, "/v1/chat/completions", body | GREEDY)
            (choice,) = answer["choices"]
            assert choice["message"] == {
                "role": "assistant",
                "content": expected["text"],
                "reasoning_content": None,
            }
            assert len(choice["logprobs"]["content"]) == 6
            assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
            assert answer["model"] == llama_folder.name
            parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
            again = await post(
                client, "/v1/chat/completions", {"messages": parts, "max_tokens": 6} | GREEDY
            )
            assert again["choices"][0]["message"]["content"] == expected["text"]

    asyncio.run(run())


def test_a_chat_without_limit_gets_the_room_there_is(llama_folder: Path) -> None:
    async def run() -> None:
        for settings, most in (({}, 494), ({"max_total_tokens": 300}, 110)):
            async with serving(llama_folder, **settings) as client:
                body = {"messages": MESSAGES, "ignore_eos": True}
                usage = (await post(client, "/v1/chat/completions", body))["usage"]
                assert usage["prompt_tokens"] == 18
                assert usage["completion_tokens"] == most

    asyncio.run(run())


def test_streamed_pieces_join_to_the_whole_answer(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            body = {"messages": MESSAGES, "max_tokens": 9} | GREEDY
            whole = await post(client, "/v1/chat/completions", body)
            body["stream_options"] = {"include_usage": True}
            chunks = await chunks_of(client, "/v1/chat/completions", body)
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            pieces = [c["choices"][0]["delta"]["content"] for c in chunks[:-1]]
            assert "".join(pieces) == whole["choices"][0]["message"]["content"]
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 9
            body = {"prompt": "abc", "max_tokens": 9, "logprobs": 1} | GREEDY
            whole = await post(client, "/v1/completions", body)
            chunks = await chunks_of(client, "/v1/completions", body)
            assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
            tokens = [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]]
            assert tokens == whole["choices"][0]["logprobs"]["tokens"]

    asyncio.run(run())


def test_requests_that_cannot_be_served_are_refused(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            for body in (
                {},
                {"messages": "x"},
                {"messages": []},
                {"messages": [5]},
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                {"messages": MESSAGES, "response_format": {"type": "json_object"}},
                {"messages": MESSAGES, "temperature": "hot"},
                {"messages": MESSAGES, "n": 0},
            ):
                await refused(client, "/v1/chat/completions", body)
            for body in ({}, {"prompt": []}, {"prompt": "a", "echo": True}, {"prompt": {"a": 1}}):
                await refused(client, "/v1/completions", body)

    asyncio.run(run())


def test_models_tokens_and_metrics(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            models = await (await client.get("/v1/models")).json()
            name = models["data"][0]["id"]
            assert name == llama_folder.name
            assert (await client.get(f"/v1/models/{name}")).status == 200
            missing = await client.get("/v1/models/nope")
            assert missing.status == 404
            assert (await missing.json())["error"]["code"] == "model_not_found"
            tokens = await post(client, "/tokenize", {"prompt": "abc"})
            assert tokens == {"tokens": [12, 13, 14], "count": 3, "max_model_len": 512}
            assert await post(client, "/v1/detokenize", {"tokens": [12, 13, 14]}) == {"text": "abc"}
            await refused(client, "/detokenize", {"tokens": [5000]})
            body = {"input_ids": [4, 5], "sampling_params": GREEDY | {"max_new_tokens": 3}}
            await post(client, "/generate", body)
            text = await (await client.get("/metrics")).text()
            assert "sglang:generation_tokens_total 3.0" in text
            assert "sglang:num_running_reqs 0.0" in text

    asyncio.run(run())


def test_an_engine_without_tokenizer_serves_ids(llama_folder: Path, other_weights: Path) -> None:
    async def run() -> None:
        async with serving(other_weights) as client:
            answer = await post(client, "/generate", {"input_ids": [4, 5]})
            assert "text" not in answer
            await refused(client, "/generate", {"text": "abc"})
            await refused(client, "/v1/chat/completions", {"messages": MESSAGES})

    asyncio.run(run())
