"""One engine's HTTP channel: deadline, safe retries, and errors a user can act on.

Nothing of aiohttp leaves this module: a call ends with the body of a 2xx answer or with one of
the errors of `engine/errors.py`, and never later than its deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from rollmill.engine.errors import (
    EngineCallError,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from rollmill.engine.retry import Throttle, Verdict, backoff_delay, judge_status

READ_BUFFER_BYTES = 1 << 20
MESSAGE_CHARACTERS = 500


def new_session(
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
) -> aiohttp.ClientSession:
    """A client session for engines: no limit on connections (the pool counts requests)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
        read_bufsize=READ_BUFFER_BYTES,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        middlewares=middlewares,
    )


def encode(payload: Mapping[str, Any]) -> bytes:
    """`payload` as JSON; numpy vectors are written as lists."""
    return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)


class StatusInStream(Exception):
    """The engine reported a failure inside a 200 answer that it streams.

    Args:
        status: the HTTP status that it stands for.
        body: the error body.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class HttpChannel:
    """Calls to one engine.

    Args:
        url: base URL, without a trailing slash.
        session: shared connection pool.
        max_retries: further tries after broken connections and 502/504.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, max_retries: int) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._max_retries = max_retries
        self._throttle = Throttle()
        self._jitter = random.Random(self.url)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | Callable[[int], bytes] | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        is_patient: bool = False,
        max_retries: int | None = None,
        sink: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """One call, retried where that is safe; returns the body of the 2xx answer.

        Args:
            method: `GET` or `POST`.
            path: starts with a slash.
            body: JSON; or a function of the try's number, for calls that change with it.
            timeout_s: deadline of the whole call, retries and waits included.
            headers: further headers.
            is_patient: wait and try again on 429/503, as long as the deadline allows.
            max_retries: overrides the channel's.
            sink: gets the body of a 2xx answer piece by piece as it arrives; b"" is returned then.
                It may raise `StatusInStream`. A connection that breaks after the first piece is
                not tried again.

        Raises:
            EngineTimeout, EngineUnreachable, EngineRefused, EngineFailed: see `engine/errors.py`.
        """
        limit = self._max_retries if max_retries is None else max_retries
        try:
            async with asyncio.timeout(timeout_s):
                return await self._tries(method, path, body, headers, is_patient, limit, sink)
        except TimeoutError:
            raise EngineTimeout(
                "the engine did not answer in time",
                where=f"{method} {self.url}{path}",
                expected=f"an answer within {timeout_s:g} s",
                found="none",
            ) from None

    async def _tries(
        self,
        method: str,
        path: str,
        body: bytes | Callable[[int], bytes] | None,
        headers: Mapping[str, str] | None,
        is_patient: bool,
        max_retries: int,
        sink: Callable[[bytes], None] | None,
    ) -> bytes:
        num_breaks = 0
        attempt = 0
        while True:
            if is_patient:
                await self._wait_while_busy()
            content = body(attempt) if callable(body) else body
            attempt += 1
            outcome = await self._once(method, path, content, headers, sink)
            if isinstance(outcome, bytes):
                return outcome
            if is_patient and outcome.verdict is Verdict.BUSY:
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(self._throttle.busy(now, self._jitter, outcome.retry_after_s))
            elif outcome.may_retry and num_breaks < max_retries:
                await asyncio.sleep(backoff_delay(num_breaks, self._jitter))
                num_breaks += 1
            else:
                raise outcome.error

    async def _once(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        sink: Callable[[bytes], None] | None,
    ) -> bytes | _Failure:
        """The body of a 2xx answer, or what went wrong."""
        where = f"{method} {self.url}{path}"
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        retry_after_s = None
        has_begun = False
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=all_headers
            ) as response:
                status = response.status
                retry_after_s = _seconds(response.headers.get("Retry-After"))
                if sink is not None and judge_status(status) is Verdict.DONE:
                    async for piece in response.content.iter_any():
                        has_begun = True
                        sink(piece)
                    content = b""
                else:
                    content = await response.read()
        except StatusInStream as failed:
            status, content = failed.status, failed.body
        except (aiohttp.ClientError, ConnectionError) as error:
            lost = EngineUnreachable(
                "the connection to the engine failed",
                where=where,
                found=f"{type(error).__name__}: {error}",
                fix="see the engine's log, and whether the address is right",
            )
            return _Failure(Verdict.BROKEN_GATEWAY, lost, None, has_begun)
        verdict = judge_status(status)
        if verdict is Verdict.DONE:
            self._throttle.served()
            return content
        failure = _status_error(verdict, status, content, where)
        return _Failure(verdict, failure, retry_after_s, has_begun)

    async def _wait_while_busy(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._throttle.wait_s(loop.time())
        while wait_s > 0:
            await asyncio.sleep(wait_s)
            wait_s = self._throttle.wait_s(loop.time())


class _Failure:
    """A try that did not end in a 2xx answer."""

    __slots__ = ("error", "has_begun", "retry_after_s", "verdict")

    def __init__(
        self,
        verdict: Verdict,
        error: EngineCallError,
        retry_after_s: float | None,
        has_begun: bool,
    ) -> None:
        self.verdict = verdict
        self.error = error
        self.retry_after_s = retry_after_s
        self.has_begun = has_begun

    @property
    def may_retry(self) -> bool:
        """Whether a connection broke before any of the answer had arrived."""
        return self.verdict is Verdict.BROKEN_GATEWAY and not self.has_begun


def _status_error(verdict: Verdict, status: int, body: bytes, where: str) -> EngineCallError:
    found = f"HTTP {status}: {error_message(body)}"
    if verdict is Verdict.REFUSED:
        refused = EngineRefused("the engine refused the request", where=where, found=found)
        refused.status = status
        return refused
    if verdict is Verdict.BROKEN_GATEWAY:
        return EngineUnreachable("the gateway lost the engine", where=where, found=found)
    return EngineFailed("the engine failed to serve the request", where=where, found=found)


def error_message(body: bytes) -> str:
    """The message in an error body, whichever of the engine's shapes it has."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        parsed = error.get("message", error) if isinstance(error, dict) else error
    text = str(parsed) if parsed is not None else body.decode(errors="replace")
    return text.strip()[:MESSAGE_CHARACTERS] or "(no message)"


def _seconds(text: str | None) -> float | None:
    """A Retry-After header as seconds; the date form is ignored."""
    try:
        return float(text) if text else None
    except ValueError:
        return None
