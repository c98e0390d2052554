"""Weight updates: all or nothing, also while requests run."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from embedded_helpers import SMALL, make_model, plain_logprobs, post, refused, serving
from test_embedded_server import PROMPT, until_running
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


async def greedy(client: Any, count: int = 8) -> Any:
    body = {
        "input_ids": PROMPT,
        "sampling_params": GREEDY | {"max_new_tokens": count},
        "return_logprob": True,
    }
    return await post(client, "/generate", body)


async def until_steps(client: Any, count: int) -> None:
    async with asyncio.timeout(20):
        while (await steps(client)) < count:
            pass


async def steps(client: Any) -> int:
    info = await (await client.get("/server_info")).json()
    return int(info["internal_states"][0]["steps"])


async def checksum(client: Any) -> str:
    answer = await post(client, "/weights_checker", {"action": "checksum"})
    return str(answer["per_engine_checksum"])


def test_new_weights_write_the_next_answer(llama_folder: Path, other_weights: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            before, old_sum = await greedy(client), await checksum(client)
            update = {"model_path": str(other_weights), "weight_version": "v1"}
            answer = await post(client, "/update_weights_from_disk", update)
            assert answer == {
                "success": True,
                "message": "Succeeded to update model weights. Weight version updated to v1.",
                "num_paused_requests": 0,
            }
            after = await greedy(client)
            assert after["meta_info"]["weight_versions"] == [
                {"version": "v1", "start": 0, "end": 8}
            ]
            assert after["meta_info"]["cached_tokens"] == 0
            assert after["output_ids"] != before["output_ids"]
            model = AutoModelForCausalLM.from_pretrained(other_weights).eval()
            expected = plain_logprobs(model, PROMPT + after["output_ids"])[6:]
            found = [lp for lp, _, _ in after["meta_info"]["output_token_logprobs"]]
            assert found == pytest.approx(expected, abs=1e-4)
            assert await checksum(client) != old_sum
            info = await (await client.get("/model_info")).json()
            assert info["weight_version"] == "v1"
            back = {"model_path": str(llama_folder)}
            answer = await post(client, "/update_weights_from_disk", back)
            assert answer["message"] == "Succeeded to update model weights."
            assert await checksum(client) == old_sum
            restored = await greedy(client)
            assert restored["output_ids"] == before["output_ids"]
            assert restored["meta_info"]["weight_version"] == "v1"

    asyncio.run(run())


@pytest.mark.parametrize("mode", [None, "retract", "in_place"])
def test_update_with_requests_in_flight_shows_in_spans(
    mode: str | None, llama_folder: Path, other_weights: Path
) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.003})
            task = asyncio.ensure_future(greedy(client, 150))
            await until_running(client, 1)
            await until_steps(client, 5)
            if mode is not None:
                await post(client, "/pause_generation", {"mode": mode})
            update = {"model_path": str(other_weights), "weight_version": "v1"}
            await post(client, "/update_weights_from_disk", update)
            if mode is not None:
                await post(client, "/continue_generation", {})
            answer = await task
        first, second = answer["meta_info"]["weight_versions"]
        assert (first["version"], second["version"]) == ("v0", "v1")
        assert (first["start"], second["end"]) == (0, 150)
        assert 0 < first["end"] == second["start"] < 150
        assert answer["meta_info"]["weight_version"] == "v1"
        if mode == "retract":  # all KV is of the new weights: log-probs are exactly theirs
            model = AutoModelForCausalLM.from_pretrained(other_weights).eval()
            cut = second["start"]
            expected = plain_logprobs(model, PROMPT + answer["output_ids"])[6 + cut :]
            found = [lp for lp, _, _ in answer["meta_info"]["output_token_logprobs"]][cut:]
            assert found == pytest.approx(expected, abs=1e-4)

    asyncio.run(run())


def test_what_old_weights_computed_is_never_used_again(
    llama_folder: Path, other_weights: Path
) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.003})
            task = asyncio.ensure_future(greedy(client, 60))
            await until_running(client, 1)
            await until_steps(client, 20)
            await post(client, "/update_weights_from_disk", {"model_path": str(other_weights)})
            answer = await task
            turn = PROMPT + answer["output_ids"] + [5]
            body = {"input_ids": turn, "sampling_params": GREEDY, "return_logprob": True}
            after = await post(client, "/generate", body)
        assert after["meta_info"]["cached_tokens"] == 0
        model = AutoModelForCausalLM.from_pretrained(other_weights).eval()
        expected = plain_logprobs(model, turn + after["output_ids"])[len(turn) - 1 :]
        found = [lp for lp, _, _ in after["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(expected, abs=1e-4)

    asyncio.run(run())


def break_missing(folder: Path) -> None:
    shutil.rmtree(folder)


def break_empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_torn(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def break_shape(folder: Path) -> None:
    make_model(LlamaConfig(**SMALL | {"intermediate_size": 40})).save_pretrained(folder)


def break_depth(folder: Path) -> None:
    make_model(LlamaConfig(**SMALL | {"num_hidden_layers": 1})).save_pretrained(folder)


def break_name(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    state["model.norm.wait"] = state.pop("model.norm.weight")
    model.save_pretrained(folder, state_dict=state)


@pytest.mark.parametrize(
    "damage",
    [break_missing, break_empty, break_torn, break_shape, break_depth, break_name],
)
def test_old_weights_stay_when_an_update_fails(
    damage: Any, llama_folder: Path, other_weights: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        broken = tmp_path / "broken"
        shutil.copytree(other_weights, broken)
        damage(broken)
        async with serving(llama_folder) as client:
            before = await checksum(client)
            update = {"model_path": str(broken), "weight_version": "v1"}
            answer = await refused(client, "/update_weights_from_disk", update)
            assert answer["success"] is False
            assert await checksum(client) == before
            info = await (await client.get("/model_info")).json()
            assert info["weight_version"] == "v0"
            await greedy(client)

    asyncio.run(run())


def test_abort_all_with_an_update(llama_folder: Path, other_weights: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            await post(client, "/slow_down", {"forward_sleep_time": 0.005})
            task = asyncio.ensure_future(greedy(client, 300))
            await until_running(client, 1)
            update = {"model_path": str(other_weights), "abort_all_requests": True}
            await post(client, "/update_weights_from_disk", update)
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"

    asyncio.run(run())


def test_mixture_of_experts_checkpoints_can_be_loaded(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    for seed, name in enumerate("ab"):
        make_model(config, seed).save_pretrained(tmp_path / name)

    async def run() -> None:
        async with serving(tmp_path / "a") as client:
            update = {"model_path": str(tmp_path / "b"), "weight_version": "v1"}
            await post(client, "/update_weights_from_disk", update)
            after = await greedy(client)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
        expected = plain_logprobs(model, PROMPT + after["output_ids"])[6:]
        found = [lp for lp, _, _ in after["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(expected, abs=1e-4)
        assert "text" not in after

    asyncio.run(run())


def test_version_name_and_weight_values(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client:
            answer = await post(client, "/update_weight_version", {"new_version": "v6"})
            assert answer == {
                "success": True,
                "message": "Weight version updated to v6",
                "new_version": "v6",
            }
            body = {"name": "model.norm.weight", "truncate_size": 5}
            assert await post(client, "/get_weights_by_name", body) == [1.0] * 5
            error = await refused(client, "/get_weights_by_name", {"name": "nope"})
            assert error == {"error": {"message": "Get parameter by name failed"}}

    asyncio.run(run())
