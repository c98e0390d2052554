"""What every engine must do when told to abort, pause, or change its weights."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from conformance_helpers import until_running

from rollmill.engine.client import EngineClient
from rollmill.engine.errors import EngineRefused
from rollmill.engine.types import FinishReason

PROMPT = [5, 9, 12, 7, 33]
LONG = {"max_new_tokens": 700, "temperature": 0.0, "ignore_eos": True}
SHORT = LONG | {"max_new_tokens": 8}


async def start_long(client: EngineClient, number: int = 1) -> list[asyncio.Task[Any]]:
    tasks = [
        asyncio.create_task(client.generate(f"long-{i}", [*PROMPT, i + 2], LONG))
        for i in range(number)
    ]
    await until_running(client, number)
    return tasks


def test_it_is_healthy_and_names_its_model(run: Any, target: Any) -> None:
    async def body(client: EngineClient) -> None:
        await client.health(timeout_s=30)
        info = await client.model_info()
        assert info.model_path
        assert info.weight_version

    run(body)


def test_an_abort_returns_the_tokens_so_far(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        (task,) = await start_long(client)
        await client.abort("long-0")
        result = await task
        assert result.finish is FinishReason.ABORT
        assert 0 <= result.num_tokens < 700
        whole = await client.generate("again", [*PROMPT, 2], SHORT)
        number = min(8, result.num_tokens)
        assert result.token_ids[:number].tolist() == whole.token_ids[:number].tolist()

    run(body)


def test_an_abort_of_an_unknown_request_is_no_error(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        await client.abort("nobody")

    run(body)


def test_abort_all_ends_everything(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        tasks = await start_long(client, 3)
        await client.abort_all()
        results = await asyncio.gather(*tasks)
        assert all(result.is_aborted for result in results)
        assert sum(load.num_running_reqs for load in await client.loads()) == 0

    run(body)


def test_a_cancelled_call_leaves_the_engine_idle(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        (task,) = await start_long(client)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()  # the abort has been sent
        await client.flush_cache(wait_s=30)  # until the engine is idle
        assert sum(load.num_running_reqs for load in await client.loads()) == 0

    run(body)


def test_a_pause_that_aborts_ends_running_requests(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        tasks = await start_long(client, 2)
        await client.pause("abort")
        results = await asyncio.gather(*tasks)
        assert all(result.is_aborted for result in results)
        await client.resume()
        assert (await client.generate("after", PROMPT, SHORT)).num_tokens == 8

    run(body)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_stands_still_and_then_goes_on_to_its_end(run: Any, mode: Any) -> None:
    async def body(client: EngineClient) -> None:
        (task,) = await start_long(client)
        await client.pause(mode)
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done
        await client.resume()
        result = await task
        assert result.finish is FinishReason.LENGTH
        assert result.num_tokens == 700
        assert result.counters.retractions == (1 if mode == "retract" else 0)

    run(body)


def test_a_request_sent_during_a_pause_is_held_until_the_end_of_it(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        await client.pause("retract")
        task = asyncio.create_task(client.generate("held", PROMPT, SHORT))
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done
        await client.resume()
        assert (await task).num_tokens == 8

    run(body)


def test_an_unknown_pause_mode_is_refused(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        bad: Any = "sideways"
        with pytest.raises(EngineRefused):
            await client.pause(bad)

    run(body)


def test_new_weights_are_served_under_their_version(run: Any, target: Any) -> None:
    async def body(client: EngineClient) -> None:
        before = await client.generate("a", PROMPT, SHORT)
        checksum = (await client.weights.sums()).total
        await client.update_weights_from_disk(target.other_model or target.model, 11)
        assert (await client.model_info()).weight_version == "11"
        after = await client.generate("b", PROMPT, SHORT, oldest_version=11)
        assert after.versions == (11,)
        if target.is_embedded:
            assert after.token_ids.tolist() != before.token_ids.tolist()
            assert (await client.weights.sums()).total != checksum
        await client.update_weights_from_disk(target.model, 12)
        assert (await client.weights.sums()).total == checksum
        back = await client.generate("c", PROMPT, SHORT)
        assert back.versions == (12,)
        assert back.token_ids.tolist() == before.token_ids.tolist()

    run(body)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weights_change_in_mid_answer_and_the_spans_say_where(
    run: Any, target: Any, mode: Any
) -> None:
    async def body(client: EngineClient) -> None:
        await client.update_weights_from_disk(target.model, 20)
        (task,) = await start_long(client)
        await client.pause(mode)
        if mode == "retract":
            await client.flush_cache()
        await client.update_weights_from_disk(
            target.other_model or target.model, 21, flush_cache=mode == "retract"
        )
        await client.resume()
        result = await task
        assert result.finish is FinishReason.LENGTH
        assert result.versions in ((20, 21), (21,))
        assert sum(len(span) for span in result.spans) == 700
        if target.is_embedded and mode == "retract" and len(result.spans) == 2:
            # What follows the change is what the new weights say about the whole context.
            change = result.spans[1].start
            whole = [*PROMPT, 2, *result.token_ids.tolist()]
            scores = await client.score(whole, len(PROMPT) + 1 + change)
            np.testing.assert_allclose(scores, result.log_probs[change:], atol=target.tolerance)
        await client.update_weights_from_disk(target.model, 22)

    run(body)


def test_a_failed_update_keeps_weights_and_version(run: Any, target: Any) -> None:
    async def body(client: EngineClient) -> None:
        await client.update_weights_from_disk(target.model, 30)
        before = await client.generate("a", PROMPT, SHORT)
        with pytest.raises(EngineRefused):
            await client.update_weights_from_disk("/no/such/folder", 31)
        assert (await client.model_info()).weight_version == "30"
        after = await client.generate("b", PROMPT, SHORT)
        assert after.versions == (30,)
        assert after.token_ids.tolist() == before.token_ids.tolist()

    run(body)


def test_released_memory_comes_back_with_the_same_weights(run: Any) -> None:
    async def body(client: EngineClient) -> None:
        before = await client.generate("a", PROMPT, SHORT)
        await client.release_memory(["kv_cache", "weights"])
        await client.resume_memory(["weights", "kv_cache"])
        after = await client.generate("b", PROMPT, SHORT)
        assert after.token_ids.tolist() == before.token_ids.tolist()

    run(body)
