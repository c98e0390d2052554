"""Updates by difference over HTTP, and the short form of an engine's load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from embedded_helpers import post, refused, serving
from safetensors.torch import load_file
from test_embedded_updates import checksum, greedy

from rollmill.exchange.checksum import checksums_of
from rollmill.exchange.delta import Side, write_delta


def write(folder: Path, old: Path, new: Path) -> str:
    before, after = (load_file(path / "model.safetensors") for path in (old, new))
    path = folder / "weights.delta"
    write_delta(path, before, after, Side(1, checksums_of(before)), Side(2, checksums_of(after)))
    return str(path)


def test_a_difference_leads_to_the_other_weights_and_back_it_is_refused(
    llama_folder: Path, other_weights: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, llama_folder, other_weights)

    async def run() -> None:
        async with serving(other_weights) as client:
            expected, written = await checksum(client), await greedy(client)
        async with serving(llama_folder) as client:
            await post(client, "/update_weights_from_delta", {"path": path, "weight_version": "2"})
            assert await checksum(client) == expected
            answer = await greedy(client)
            assert answer["output_ids"] == written["output_ids"]
            assert answer["meta_info"]["weight_version"] == "2"
            again: dict[str, Any] = {"path": path, "weight_version": "3"}
            async with client.post("/update_weights_from_delta", json=again) as response:
                assert response.status == 409
                assert "starts from version 1" in (await response.json())["message"]
            assert await checksum(client) == expected
            assert (await greedy(client))["meta_info"]["weight_version"] == "2"

    asyncio.run(run())


def test_what_was_prepared_is_put_in_without_the_file(
    llama_folder: Path, other_weights: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, llama_folder, other_weights)

    async def run() -> None:
        async with serving(other_weights) as client:
            expected = await checksum(client)
        async with serving(llama_folder) as client:
            before, written = await checksum(client), await greedy(client)
            answer = await post(client, "/prepare_weights_from_delta", {"path": path})
            assert await checksum(client) == before
            assert (await greedy(client))["output_ids"] == written["output_ids"]
            Path(path).unlink()
            body = {"path": path, "weight_version": "2", "prepared": answer["prepared"]}
            await post(client, "/update_weights_from_delta", body)
            assert await checksum(client) == expected
            assert (await greedy(client))["meta_info"]["weight_version"] == "2"
            await refused(client, "/update_weights_from_delta", body)  # it is used up

    asyncio.run(run())


def test_what_was_prepared_from_other_weights_is_never_put_in(
    llama_folder: Path, other_weights: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, llama_folder, other_weights)

    async def run() -> None:
        async with serving(llama_folder) as client:
            answer = await post(client, "/prepare_weights_from_delta", {"path": path})
            load = {"model_path": str(other_weights), "weight_version": "7"}
            await post(client, "/update_weights_from_disk", load)
            expected = await checksum(client)
            body = {"path": path, "weight_version": "2", "prepared": answer["prepared"]}
            for path_, content in (
                ("/update_weights_from_delta", body),
                ("/prepare_weights_from_delta", {"path": path}),
            ):
                async with client.post(path_, json=content) as response:
                    assert response.status == 409
            assert await checksum(client) == expected
            assert (await greedy(client))["meta_info"]["weight_version"] == "7"

    asyncio.run(run())


def test_a_number_that_names_nothing_has_the_update_worked_out_anew(
    llama_folder: Path, other_weights: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, llama_folder, other_weights)

    async def run() -> None:
        async with serving(other_weights) as client:
            expected = await checksum(client)
        async with serving(llama_folder) as client:
            await post(client, "/prepare_weights_from_delta", {"path": path})
            body = {"path": path, "weight_version": "2", "prepared": 99}
            await post(client, "/update_weights_from_delta", body)
            assert await checksum(client) == expected

    asyncio.run(run())


def test_what_cannot_be_used_leaves_the_old_weights(
    llama_folder: Path, other_weights: Path, tmp_path: Path
) -> None:
    path = Path(write(tmp_path, llama_folder, other_weights))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    async def run() -> None:
        async with serving(llama_folder) as client:
            before = await checksum(client)
            for body in ({"path": str(path)}, {"path": "/no/such/file"}, {}, {"path": 5}):
                await refused(client, "/update_weights_from_delta", body)
                await refused(client, "/prepare_weights_from_delta", body)
            await post(client, "/release_memory_occupation", {"tags": ["weights"]})
            await refused(client, "/update_weights_from_delta", {"path": str(path)})
            await refused(client, "/prepare_weights_from_delta", {"path": str(path)})
            await refused(client, "/weights_checker", {})
            await post(client, "/resume_memory_occupation", {"tags": ["weights"]})
            assert await checksum(client) == before

    asyncio.run(run())


def test_the_load_in_its_short_form(llama_folder: Path) -> None:
    async def run() -> None:
        async with serving(llama_folder) as client, client.get("/get_load") as response:
            (load,) = await response.json()
            assert load.keys() == {
                "dp_rank",
                "num_reqs",
                "num_waiting_reqs",
                "num_tokens",
                "ts_tic",
            }
            assert (load["dp_rank"], load["num_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)

    asyncio.run(run())
