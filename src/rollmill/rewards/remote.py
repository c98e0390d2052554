"""`remote`: a server that judges. POST `{prompt, response, label, metadata}`, a number comes back.

The one reward that is not graded in a worker process: it only waits, so it lives in the run's
event loop, with a pool of connections, a time limit over all tries, and bounded retries with
jitter. The answer may be a bare number, `{"reward": number}` or `{"score": number}`, a mapping
from names to numbers, or null (invalid). With `batch_size` above 1 the body is
`{"batch": [...]}` and so is the answer, one entry per request, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import aiohttp
import orjson
from pydantic import Field

from rollmill.config.reward import RewardConfig
from rollmill.rewards.graders.base import Params
from rollmill.rewards.inputs import RewardInput, checked_reward
from rollmill.rewards.mathematics.extract import last_boxed
from rollmill.rewards.outcome import Outcome, OutcomeKind
from rollmill.rewards.protocol import plain
from rollmill.rewards.registry import REMOTE, parsed_params
from rollmill.sample import Reward

MAX_ANSWER_BYTES = 1 << 20
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))


class RemoteParams(Params):
    """Settings of `remote`."""

    url: str = Field(pattern=r"^https?://")
    """Where to POST."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of each request."""
    timeout_s: float | None = Field(None, gt=0)
    """Limit over all tries of one answer; null takes `reward.timeout_s`."""
    max_tries: int = Field(5, ge=1)
    """Tries when the connection fails or the server answers 408, 425, 429, 500, 502, 503, 504."""
    max_backoff_s: float = Field(8.0, gt=0)
    """Longest wait between tries."""
    max_connections: int = Field(64, ge=1)
    """Requests in flight."""
    batch_size: int = Field(1, ge=1)
    """Answers per request; above 1 the server must take batches."""
    batch_wait_s: float = Field(0.02, ge=0)
    """How long a batch waits to fill."""


class _BadAnswer(Exception):
    """The server answered, but not with a reward; trying again would not help."""


class _Retry(Exception):
    """A failure that may pass."""


class RemoteReward:
    """The client of one judging server."""

    def __init__(self, config: RewardConfig) -> None:
        self._params = parsed_params(RemoteParams, REMOTE, config)
        self._timeout_s = self._params.timeout_s or config.timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._flusher: asyncio.TimerHandle | None = None
        self._batches: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Give up what is in flight and close the connections."""
        if self._flusher is not None:
            self._flusher.cancel()
        for batch in list(self._batches):
            batch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await batch
        if self._session is not None:
            await self._session.close()

    async def judge(self, item: RewardInput, *, is_boxed: bool) -> Outcome:
        """The server's judgement of one answer."""
        start = time.perf_counter()
        response: str | None = item.response
        if is_boxed:
            response = last_boxed(item.response)
            if response is None or not response.strip():
                return Outcome(OutcomeKind.INVALID, detail="no answer found")
        body = {
            "prompt": item.prompt,
            "response": response,
            "label": item.label,
            "metadata": item.metadata,
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                reward = _read_reward(await self._ask(body))
        except TimeoutError:
            detail = f"the server gave no answer within {self._timeout_s:g} s"
            return Outcome(OutcomeKind.TIMEOUT, detail=detail, seconds=time.perf_counter() - start)
        except (_BadAnswer, _Retry) as error:
            return Outcome.error(str(error), time.perf_counter() - start)
        kind = OutcomeKind.INVALID if reward is None else OutcomeKind.VALUE
        return Outcome(kind, reward, seconds=time.perf_counter() - start)

    async def _ask(self, body: dict[str, Any]) -> Any:
        if self._params.batch_size == 1:
            return await self._post(body)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((body, future))
        if len(self._waiting) >= self._params.batch_size:
            self._send_batch()
        elif self._flusher is None:
            self._flusher = loop.call_later(self._params.batch_wait_s, self._send_batch)
        return await future

    def _send_batch(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        waiting, self._waiting = self._waiting, []
        waiting = [(body, future) for body, future in waiting if not future.done()]
        if waiting:
            batch = asyncio.create_task(self._run_batch(waiting))
            self._batches.add(batch)
            batch.add_done_callback(self._batches.discard)

    async def _run_batch(self, waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        error: Exception | None = None
        answers: list[Any] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._post({"batch": [body for body, _ in waiting]})
            answers = answer.get("batch", []) if isinstance(answer, dict) else answer
            if not isinstance(answers, list) or len(answers) != len(waiting):
                raise _BadAnswer(f"expected a batch of {len(waiting)} rewards from the server")
        except (_BadAnswer, _Retry, TimeoutError) as failure:
            error = failure
        for k, (_, future) in enumerate(waiting):
            if not future.done():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(answers[k])

    async def _post(self, body: dict[str, Any]) -> Any:
        data = _encoded(body)
        for attempt in range(self._params.max_tries):
            if attempt:
                longest = min(2.0 ** (attempt - 1) * 0.25, self._params.max_backoff_s)
                await asyncio.sleep(random.uniform(longest / 2, longest))
            try:
                return await self._post_once(data)
            except _Retry:
                if attempt + 1 == self._params.max_tries:
                    raise
        raise AssertionError("unreachable: max_tries is at least 1")

    async def _post_once(self, data: bytes) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._params.max_connections)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._params.headers,
                timeout=aiohttp.ClientTimeout(total=None),  # `timeout_s` is the limit
            )
        headers = {"Content-Type": "application/json"}
        url = self._params.url
        try:
            async with self._session.post(url, data=data, headers=headers) as response:
                raw = await _body(response, url)
                if response.status in _RETRIED:
                    raise _Retry(f"{url} answered {response.status} after all tries")
                if response.status != 200:
                    told = raw[:200].decode("utf-8", "replace")
                    raise _BadAnswer(f"{url} answered {response.status}: {told}")
        except (aiohttp.ClientError, OSError) as error:
            raise _Retry(f"{url} cannot be reached: {error}") from error
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _BadAnswer(f"expected JSON from {url}, found {raw[:200]!r}") from error


async def _body(response: aiohttp.ClientResponse, url: str) -> bytes:
    """The whole answer, in however many pieces it comes."""
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > MAX_ANSWER_BYTES:
            raise _BadAnswer(f"{url} answered more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(raw)


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        return orjson.dumps(plain(body, big_ints_as_text=True))


def _read_reward(answer: Any) -> Reward | None:
    if isinstance(answer, dict) and isinstance(answer.get("reward", ""), int | float | dict | None):
        answer = answer["reward"]
    elif isinstance(answer, dict) and set(answer) == {"score"}:
        answer = answer["score"]
    try:
        return checked_reward(answer)
    except ValueError as error:
        raise _BadAnswer(f"the server's answer is no reward: {error}") from error
