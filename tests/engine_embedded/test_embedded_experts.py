"""Routed experts as the engine reports them, against the router logits of an ordinary forward."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_helpers import SMALL, make_model, post, refused, serving
from transformers import Qwen3MoeConfig

from rollmill.config.engine import EngineConfig
from rollmill.engine.embedded.state import STATE
from rollmill.engine.pool import EnginePool

LAYERS, TOP_K = 3, 2
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    make_model(moe_config()).save_pretrained(folder)
    return folder


def moe_config() -> Qwen3MoeConfig:
    """Three layers, the one in the middle dense."""
    sizes = SMALL | {"num_hidden_layers": LAYERS, "mlp_only_layers": [1]}
    return Qwen3MoeConfig(
        **sizes, num_experts=8, num_experts_per_tok=TOP_K, moe_intermediate_size=16
    )


def expected(tokens: list[int]) -> np.ndarray[Any, Any]:
    """`[positions, layers, top_k]`, best expert first; dense layers are 0."""
    model = make_model(moe_config())
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), output_router_logits=True, use_cache=False)
    routed = np.zeros((len(tokens), LAYERS, TOP_K), np.int32)
    for layer, logits in zip((0, 2), out.router_logits, strict=True):
        routed[:, layer] = logits.topk(TOP_K, dim=-1).indices.numpy()
    return routed


def decoded(meta: dict[str, Any]) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    return flat.reshape(-1, LAYERS, TOP_K)


def request(prompt: list[int], **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True} | more


def test_experts_are_those_of_the_routers_logits(moe_folder: Path) -> None:
    async def run() -> None:
        async with serving(moe_folder, chunked_prefill_tokens=16) as client:
            plain = request(PROMPT, return_routed_experts=False)
            assert "routed_experts" not in (await post(client, "/generate", plain))["meta_info"]
            for _ in range(2):  # the second finds its prompt in the cache
                answer = await post(client, "/generate", request(PROMPT))
                whole = expected([*PROMPT, *answer["output_ids"][:-1]])
                assert (decoded(answer["meta_info"]) == whole).all()
            part = await post(client, "/generate", request(PROMPT, routed_experts_start_len=30))
            assert (decoded(part["meta_info"]) == whole[30:]).all()

    asyncio.run(run())


def test_experts_of_a_batch_and_of_samples(moe_folder: Path) -> None:
    async def run() -> None:
        async with serving(moe_folder, chunked_prefill_tokens=16) as client:
            sampling = {"max_new_tokens": 9, "n": 3, "ignore_eos": True}
            body = request([PROMPT, PROMPT[:7]], sampling_params=sampling)
            for number, answer in enumerate(await post(client, "/generate", body)):
                prompt = PROMPT if number < 3 else PROMPT[:7]
                whole = expected([*prompt, *answer["output_ids"][:-1]])
                assert (decoded(answer["meta_info"]) == whole).all()

    asyncio.run(run())


def test_a_retracted_request_keeps_its_experts(moe_folder: Path) -> None:
    async def run() -> None:
        async with serving(moe_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.005})
            sampling = {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True}
            body = request(PROMPT, sampling_params=sampling)
            task = asyncio.create_task(post(client, "/generate", body))
            generated = 0
            while generated < 5:
                async with client.get("/server_info") as response:
                    state = (await response.json())["internal_states"][0]
                generated = state["steps"]
            await post(client, "/pause_generation", {"mode": "retract"})
            await post(client, "/continue_generation", {})
            answer = await task
            assert answer["meta_info"]["num_retractions"] == 1
            whole = expected([*PROMPT, *answer["output_ids"][:-1]])
            assert (decoded(answer["meta_info"]) == whole).all()

    asyncio.run(run())


def test_the_pool_decodes_them_and_the_result_carries_them(
    moe_folder: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        async with serving(moe_folder) as client:
            url = str(client.make_url("/"))
            config = EngineConfig(urls=(url,), return_routed_experts=True)
            await post(client, "/update_weight_version", {"new_version": "0"})
            async with EnginePool(config, model_path=str(moe_folder), run_dir=tmp_path) as pool:
                result = await pool.generate("r", PROMPT, {"max_new_tokens": 6})
            whole = expected([*PROMPT, *result.token_ids[:-1].tolist()])
            assert result.routed_experts is not None
            assert (result.routed_experts == whole).all()

    asyncio.run(run())


def test_a_model_without_experts_reports_none(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            answer = await post(client, "/generate", request(PROMPT))
            assert "routed_experts" not in answer["meta_info"]
            bad = request(PROMPT, routed_experts_start_len=len(PROMPT) + 1)
            answer = await refused(client, "/generate", bad)
            assert "routed_experts_start_len" in answer["error"]["message"]

    asyncio.run(run())


def test_an_answer_aborted_within_its_prompt_is_aborted_not_malformed(
    moe_folder: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        async with serving(moe_folder, chunked_prefill_tokens=8) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.05})
            config = EngineConfig(urls=(str(client.make_url("/")),), return_routed_experts=True)
            await post(client, "/update_weight_version", {"new_version": "0"})
            async with EnginePool(config, model_path=str(moe_folder), run_dir=tmp_path) as pool:
                task = asyncio.ensure_future(pool.generate("r", PROMPT * 4, {"max_new_tokens": 6}))
                scheduler = client.server.app[STATE].engine.scheduler  # type: ignore[attr-defined]
                while not any(f.done for f in list(scheduler.fills)):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await pool.abort_all(10.0)
                result = await task
            assert result.is_aborted
            assert result.num_tokens == 0
            assert result.routed_experts is None

    asyncio.run(run())
