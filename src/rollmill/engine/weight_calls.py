"""One engine's calls about weights, other than loading a folder: groups, deltas, checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollmill.engine.errors import EngineRefused, MalformedAnswer, OtherBase
from rollmill.engine.http import HttpChannel, encode
from rollmill.engine.server_info import ServerInfo
from rollmill.exchange.specs import LOAD_FORMAT, WeightSpec

CONTROL_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 600.0
MARGIN_S = 10.0
"""Beyond a group's own timeout, for the engine to say so."""
OTHER_BASE = 409
UNKNOWN_CALL = 404


class WeightSums(msgspec.Struct, frozen=True):
    """Checksums of an engine's weights: one of all, and those by weight.

    Totals are equal on engines of one kind that serve equal weights. `algorithm` and `dtypes` are
    there when somebody who holds the weights can compare his own (the embedded engine).
    """

    total: str
    by_weight: dict[str, str] = {}
    algorithm: str | None = None
    dtypes: dict[str, str] = {}


class _CheckedRank(msgspec.Struct):
    checksums: dict[str, str] = {}
    algorithm: str | None = None
    dtypes: dict[str, str] = {}


class _Checked(msgspec.Struct):
    per_engine_checksum: str
    ranks: list[_CheckedRank] = []


class _Prepared(msgspec.Struct):
    prepared: int


_Info = TypeVar("_Info", _Checked, _Prepared, ServerInfo)


class WeightCalls:
    """Calls to one engine.

    Args:
        http: the engine's channel.
    """

    def __init__(self, http: HttpChannel) -> None:
        self._http = http

    async def sums(self) -> WeightSums:
        """Checksums of the weights that the engine serves."""
        path = "/weights_checker"
        body = await self._post(path, {"action": "checksum"}, timeout_s=UPDATE_TIMEOUT_S)
        answer = self._decode(body, _Checked, path)
        rank = answer.ranks[0] if len(answer.ranks) == 1 else _CheckedRank()
        return WeightSums(answer.per_engine_checksum, rank.checksums, rank.algorithm, rank.dtypes)

    async def server_info(self) -> ServerInfo:
        """What the engine is."""
        path = "/server_info"
        body = await self._http.call("GET", path, timeout_s=CONTROL_TIMEOUT_S)
        return self._decode(body, ServerInfo, path)

    async def prepare_delta(self, path: str) -> int:
        """Have an embedded engine work out, beside its weights, what the file makes of them;
        returns the number by which `apply_delta` finds it. Generation goes on.

        Raises:
            OtherBase: the engine's weights are not those the delta starts from.
            EngineCallError: it did not work.
        """
        body = await self._post_delta("/prepare_weights_from_delta", {"path": path})
        return self._decode(body, _Prepared, "/prepare_weights_from_delta").prepared

    async def apply_delta(self, path: str, version: int, *, prepared: int | None = None) -> None:
        """Have an embedded engine change its weights as the file says, and call them `version`.

        Args:
            path: the file.
            version: what the new weights are called.
            prepared: what `prepare_delta` returned; the engine then has to put it in only.

        Raises:
            OtherBase: the engine's weights are not those the delta starts from; they stay.
            EngineCallError: it did not work; the old weights stay.
        """
        payload: dict[str, Any] = {"path": path, "weight_version": str(version)}
        if prepared is not None:
            payload["prepared"] = prepared
        await self._post_delta("/update_weights_from_delta", payload)

    async def _post_delta(self, path: str, payload: Mapping[str, Any]) -> bytes:
        try:
            return await self._post(path, payload, timeout_s=UPDATE_TIMEOUT_S)
        except EngineRefused as error:
            if error.status == OTHER_BASE:
                raise OtherBase(
                    "the engine holds other weights than the delta starts from",
                    where=self._http.url,
                    found=error.found,
                ) from error
            raise

    async def join_group(
        self,
        name: str,
        *,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join a process group as rank `rank` (and the ones after it, when the engine has several);
        returns when everybody has."""
        payload = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
            "timeout_s": timeout_s,
        }
        await self._post(
            "/init_weights_update_group", payload, timeout_s=timeout_s + MARGIN_S, max_retries=0
        )

    async def leave_group(self, name: str, *, timeout_s: float) -> None:
        """Leave a process group."""
        await self._post(
            "/destroy_weights_update_group",
            {"group_name": name},
            timeout_s=timeout_s,
            max_retries=0,
        )

    async def begin(self, *, timeout_s: float) -> None:
        """Open a session; `receive` needs one."""
        await self._post_rare("/begin_weight_update", {}, timeout_s)

    async def end(self, *, timeout_s: float) -> None:
        """Close the session: the engine uses what it received."""
        await self._post("/end_weight_update", {}, timeout_s=timeout_s, max_retries=0)

    async def discard(self, *, timeout_s: float) -> None:
        """Close the session. An embedded engine keeps its old weights; SGLang uses each bucket as
        it comes, so it holds a mixture until it is given whole weights."""
        await self._post(
            "/end_weight_update", {"discard": True}, timeout_s=timeout_s, max_retries=0
        )

    async def receive(
        self,
        bucket: Sequence[WeightSpec],
        group: str,
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Take the bucket that rank 0 of the group broadcasts next.

        Args:
            bucket: its weights.
            group: the group's name.
            version: what the weights are called from the end of the session on, with the last
                bucket.
            flush_cache: forget what the old weights computed.
            timeout_s: the group's.
        """
        payload: dict[str, Any] = {
            **_described(bucket),
            "group_name": group,
            "load_format": LOAD_FORMAT,
            "flush_cache": flush_cache,
        }
        if version is not None:
            payload["weight_version"] = str(version)
        await self._post(
            "/update_weights_from_distributed",
            payload,
            timeout_s=timeout_s + MARGIN_S,
            max_retries=0,
        )

    async def copy(
        self,
        bucket: Sequence[WeightSpec],
        handle: Mapping[str, Any],
        *,
        checksums: Sequence[str] | None,
        version: int | None,
        timeout_s: float,
    ) -> None:
        """Have an embedded engine copy a bucket from memory on its machine, within a session.

        Args:
            bucket: its weights.
            handle: the memory; see `exchange.handles`.
            checksums: one of each weight, to be compared; None compares none.
            version: as for `receive`.
            timeout_s: how long that may take.
        """
        payload = _described(bucket) | {"handle": dict(handle)}
        if checksums is not None:
            payload["checksums"] = list(checksums)
        await self._post_tensors(payload, version, timeout_s)

    async def unpickle(
        self,
        pickles: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Have SGLang take a bucket, within a session.

        Args:
            pickles: one for each of its ranks.
            version: as for `receive`.
            flush_cache: as for `receive`.
            timeout_s: how long that may take.
        """
        payload = {
            "serialized_named_tensors": list(pickles),
            "load_format": LOAD_FORMAT,
            "flush_cache": flush_cache,
        }
        await self._post_tensors(payload, version, timeout_s)

    async def _post_tensors(
        self, payload: dict[str, Any], version: int | None, timeout_s: float
    ) -> None:
        if version is not None:
            payload["weight_version"] = str(version)
        await self._post_rare("/update_weights_from_tensor", payload, timeout_s)

    async def _post_rare(self, path: str, payload: Mapping[str, Any], timeout_s: float) -> None:
        """A call that engines of other releases may not know."""
        try:
            await self._post(path, payload, timeout_s=timeout_s, max_retries=0)
        except EngineRefused as error:
            if error.status != UNKNOWN_CALL:
                raise
            unknown = EngineRefused(
                "this engine cannot take weights in the way that weights.transport says",
                where=self._http.url,
                expected=f"an engine that knows {path}, as SGLang 0.5.23 does",
                found=error.found,
                fix="set weights.transport to disk",
            )
            unknown.status = UNKNOWN_CALL
            raise unknown from error

    def _decode(self, body: bytes, kind: type[_Info], path: str) -> _Info:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise MalformedAnswer(
                "the engine's answer has another shape than expected",
                where=f"{self._http.url}{path}",
                found=f"{error}; the answer begins {body[:80]!r}",
            ) from error

    async def _post(
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        max_retries: int | None = None,
    ) -> bytes:
        return await self._http.call(
            "POST", path, encode(payload), timeout_s=timeout_s, max_retries=max_retries
        )


def _described(bucket: Sequence[WeightSpec]) -> dict[str, Any]:
    """A bucket's weights as engines read them."""
    return {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [list(spec.shape) for spec in bucket],
    }
