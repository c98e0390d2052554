"""The `remote` reward against a real server on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollmill.config.reward import RewardConfig
from rollmill.errors import RewardError
from rollmill.rewards.judge import Judge
from rollmill.rewards.outcome import Outcome
from rollmill.sample import Sample

HERE = Path(__file__).parent
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(handler: Handler, samples: list[Sample], **params: Any) -> list[Outcome]:
    """The outcomes of samples that a server with this handler judges."""

    async def main() -> list[Outcome]:
        app = web.Application()
        app.router.add_post("/judge", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        kind = params.pop("kind", "remote")
        config = RewardConfig(
            type=kind,
            timeout_s=params.pop("limit", 5.0),
            params={"url": f"http://127.0.0.1:{port}/judge", "max_backoff_s": 0.01, **params},
        )
        try:
            async with Judge(config, seed=0, base_dir=HERE) as judge:
                return list(await asyncio.gather(*(judge.judge(s) for s in samples)))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def answer(response: str, label: Any = None, **fields: Any) -> Sample:
    return Sample([1], response=response, label=label, **fields)


def test_an_answer_that_comes_in_pieces_is_read_whole() -> None:
    """`1` and then `2.5` is 12.5, not 1."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"1")
        await asyncio.sleep(0.05)  # so that the first piece goes alone
        await response.write(b"2.5")
        await response.write_eof()
        return response

    (outcome,) = serve(handler, [answer("x")])

    assert outcome.reward == 12.5


def test_the_server_gets_prompt_response_label_and_metadata() -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(0.25)

    sample = answer("four", 10**30, prompt="2+2?", metadata={"level": 3})
    (outcome,) = serve(handler, [sample])

    assert outcome.reward == 0.25
    assert seen == [
        {"prompt": "2+2?", "response": "four", "label": str(10**30), "metadata": {"level": 3}}
    ]


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        ({"reward": 2}, 2.0),
        ({"score": 0.5}, 0.5),
        ({"score": 1, "acc": 0}, {"score": 1.0, "acc": 0.0}),
        ({"reward": {"a": 1, "b": 2}}, {"a": 1.0, "b": 2.0}),
        (True, 1.0),
    ],
)
def test_all_forms_of_a_reward_are_understood(body: Any, reward: Any) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(body)

    assert serve(handler, [answer("x")])[0].reward == reward


def test_null_is_invalid() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(None)

    assert serve(handler, [answer("x")])[0].kind == "invalid"


@pytest.mark.parametrize("text", ["", "not json", '"text"', "[1]", '{"reward": "high"}', "NaN"])
def test_an_answer_that_is_no_reward_is_an_error(text: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=text)

    assert serve(handler, [answer("x")])[0].kind == "error"


@pytest.mark.parametrize(("failures", "kind"), [(2, "value"), (3, "error")])
def test_failures_that_may_pass_are_tried_again_up_to_a_bound(failures: int, kind: str) -> None:
    tries = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        return web.json_response(1.0, status=503 if tries <= failures else 200)

    assert serve(handler, [answer("x")], max_tries=3)[0].kind == kind
    assert tries == 3


def test_other_failures_are_not_tried_again() -> None:
    tries = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        return web.Response(status=400, text="bad row")

    (outcome,) = serve(handler, [answer("x")])

    assert outcome.kind == "error"
    assert "400" in str(outcome.detail)
    assert tries == 1


def test_a_server_that_hangs_is_a_timeout() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    (outcome,) = serve(handler, [answer("x")], limit=0.2)

    assert outcome.kind == "timeout"


def test_batches_are_sent_whole_and_taken_apart_in_order() -> None:
    sizes: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        batch = (await request.json())["batch"]
        sizes.append(len(batch))
        return web.json_response({"batch": [float(row["response"]) for row in batch]})

    outcomes = serve(handler, [answer(str(k)) for k in range(10)], batch_size=4)

    assert [outcome.reward for outcome in outcomes] == [float(k) for k in range(10)]
    assert sorted(sizes) == [2, 4, 4]


def test_a_batch_of_the_wrong_size_is_an_error_for_all() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response([1.0])

    outcomes = serve(handler, [answer("a"), answer("b")], batch_size=2)

    assert [outcome.kind for outcome in outcomes] == ["error", "error"]


def test_boxed_remote_sends_the_content_of_the_box() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(float((await request.json())["response"]))

    outcomes = serve(handler, [answer(r"so \boxed{7}"), answer("no box")], kind="boxed_remote")

    assert [(o.kind.value, o.reward) for o in outcomes] == [("value", 7.0), ("invalid", None)]


def test_remote_without_a_url_stops_the_start() -> None:
    async def main() -> None:
        async with Judge(RewardConfig(type="remote"), seed=0, base_dir=HERE):
            pass

    with pytest.raises(RewardError, match="url"):
        asyncio.run(main())
