"""Malformed and hostile requests: refused or served, never a 500, and nothing stays behind.

Set ROLLMILL_FUZZ_EXAMPLES for a longer run; an example is three to six requests sent at once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from pathlib import Path
from typing import Any

from embedded_helpers import post, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.engine.embedded.sequence import Sequence
from rollmill.engine.embedded.state import STATE

NUM_EXAMPLES = int(os.environ.get("ROLLMILL_FUZZ_EXAMPLES", "150"))

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "abc", "\ud7ff", "x" * 300, "-1", "1e400"])
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
IDS = st.lists(st.integers(0, 63), min_size=1, max_size=20)


def sometimes(sensible: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(sensible, sensible, sensible, VALUES)


SAMPLING = st.fixed_dictionaries(
    {"max_new_tokens": sometimes(st.integers(0, 6))},
    optional={
        "temperature": sometimes(st.floats(0, 2)),
        "top_p": sometimes(st.floats(0.01, 1)),
        "top_k": sometimes(st.integers(-1, 80)),
        "min_p": sometimes(st.floats(0, 1)),
        "frequency_penalty": sometimes(st.floats(-2, 2)),
        "presence_penalty": sometimes(st.floats(-2, 2)),
        "repetition_penalty": sometimes(st.floats(0.1, 2)),
        "min_new_tokens": sometimes(st.integers(0, 6)),
        "n": sometimes(st.integers(1, 3)),
        "stop": sometimes(st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3)),
        "stop_token_ids": sometimes(IDS),
        "logit_bias": sometimes(st.dictionaries(st.sampled_from(["3", "63", "64", "x"]), SCALARS)),
        "sampling_seed": sometimes(st.integers(-(2**63), 2**63 - 1)),
        "stream_interval": sometimes(st.integers(1, 4)),
        "ignore_eos": sometimes(st.booleans()),
        "no_stop_trim": sometimes(st.booleans()),
        "skip_special_tokens": sometimes(st.booleans()),
        "regex": VALUES,
    },
)
GENERATE = st.fixed_dictionaries(
    {},
    optional={
        "input_ids": sometimes(IDS | st.lists(IDS, min_size=1, max_size=3)),
        "text": sometimes(st.text(max_size=10)),
        "sampling_params": sometimes(SAMPLING | st.lists(SAMPLING, max_size=3)),
        "rid": sometimes(st.text(max_size=4)),
        "stream": sometimes(st.booleans()),
        "return_logprob": sometimes(st.booleans()),
        "logprob_start_len": sometimes(st.integers(-1, 20)),
        "top_logprobs_num": sometimes(st.integers(0, 70)),
        "token_ids_logprob": sometimes(IDS),
        "return_text_in_logprobs": sometimes(st.booleans()),
        "return_prompt_token_ids": sometimes(st.booleans()),
        "image_data": VALUES,
        "unknown": VALUES,
    },
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": sometimes(st.just("user")), "content": VALUES}
)
OPENAI = st.fixed_dictionaries(
    {"max_tokens": sometimes(st.integers(0, 5))},
    optional={
        "prompt": sometimes(st.text(max_size=6) | IDS),
        "messages": sometimes(st.lists(MESSAGE, max_size=3)),
        "temperature": sometimes(st.floats(0, 2)),
        "logprobs": sometimes(st.booleans()),
        "top_logprobs": sometimes(st.integers(0, 5)),
        "n": sometimes(st.integers(1, 3)),
        "stream": sometimes(st.booleans()),
        "stream_options": VALUES,
        "tools": VALUES,
        "chat_template_kwargs": VALUES,
        "response_format": VALUES,
        "seed": VALUES,
    },
)
OTHER = st.dictionaries(
    st.sampled_from(
        [
            *("rid", "abort_all", "abort_message", "model_path", "weight_version", "new_version"),
            *("name", "truncate_size", "action", "tags", "prompt", "tokens", "names", "dtypes"),
            *("shapes", "group_name", "load_format", "handle", "checksums"),
        ]
    ),
    VALUES,
    max_size=6,
)
CONTROL = [
    "/abort_request",
    "/begin_weight_update",
    "/destroy_weights_update_group",
    "/detokenize",
    "/end_weight_update",
    "/flush_cache",
    "/get_weights_by_name",
    "/init_weights_update_group",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/tokenize",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/weights_checker",
]
REQUESTS = st.one_of(
    st.tuples(st.just("/generate"), GENERATE),
    st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), OPENAI),
    st.tuples(st.sampled_from(CONTROL), OTHER | VALUES),
    st.tuples(st.just("/generate"), st.binary(max_size=30)),
)


async def send(client: Any, path: str, body: Any) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data) as response:
        await response.read()
        assert response.status < 500, (path, body, await response.text())


async def send_all(client: Any, requests: list[tuple[str, Any]]) -> None:
    """Send them at once; what they paused or released goes on, so that all of them end."""
    tasks = [asyncio.ensure_future(send(client, path, body)) for path, body in requests]
    pairs = zip(tasks, requests, strict=True)
    await asyncio.gather(*(task for task, (path, _) in pairs if path in CONTROL))
    for tag in ("weights", "kv_cache", "cuda_graph"):
        await client.post("/resume_memory_occupation", json={"tags": [tag]})
    await post(client, "/continue_generation", {})
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)


async def answer(client: Any) -> list[int]:
    body = {
        "input_ids": [3, 4],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    }
    ids: list[int] = (await post(client, "/generate", body))["output_ids"]
    return ids


async def check_nothing_left(client: Any) -> None:
    async with client.post("/flush_cache", params={"timeout": "10"}) as response:
        assert response.status == 200
    state = client.server.app[STATE]
    scheduler, kv = state.engine.scheduler, state.engine.runner.kv
    assert not state.in_flight
    assert not state.broker._queues
    assert not scheduler.num_unfinished
    assert not scheduler.prefixes.entries
    assert not kv.pools()
    assert not kv.blocks
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Sequence]


def test_no_request_gives_500_or_stays_behind(llama_folder: Path) -> None:
    with asyncio.Runner() as runner:
        context = serving(llama_folder)
        client = runner.run(context.__aenter__())
        before = runner.run(answer(client))
        num_sent = 0

        @settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(st.lists(REQUESTS, min_size=3, max_size=6))
        def check(requests: list[tuple[str, Any]]) -> None:
            nonlocal num_sent
            num_sent += len(requests)
            runner.run(send_all(client, requests))

        check()
        assert num_sent >= 3 * NUM_EXAMPLES
        assert runner.run(answer(client)) == before
        runner.run(check_nothing_left(client))
        runner.run(context.__aexit__(None, None, None))
