"""An answer that arrives in pieces, and what is known of it at any moment. Pure: no I/O.

Engines stream in one of two ways, and each piece shows in which: it holds everything so far
(SGLang's default), or what is new (SGLang with `--incremental-streaming-output`, and the embedded
engine). Invariant: the pieces that are kept hold each token once. Their log-probs are read when the
answer ends or is given up, so every token is converted once, however many pieces came.

Which weights wrote a token is said for certain at the end only; the embedded engine says it with
every piece. SGLang names one version per piece, so from the first piece with another version than
the one before on, nobody knows: such tokens are not kept when the answer breaks off.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from rollmill.engine.answer import Finish, Span, decode_pieces
from rollmill.engine.errors import MalformedAnswer
from rollmill.engine.http import StatusInStream
from rollmill.engine.parse import check_generate
from rollmill.engine.types import GenerateResult

END_OF_EVENT = b"\n\n"
PREFIX = b"data:"
DONE = b"[DONE]"
FAILED = 500
"""The HTTP status of an error in a stream that names none."""


class _HeadMeta(msgspec.Struct):
    """The part of `meta_info` that is read at once."""

    finish_reason: Finish | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None


class _Head(msgspec.Struct):
    """What is read of a piece when it arrives; the rest is skipped, not converted."""

    output_ids: list[int] = []
    meta_info: _HeadMeta | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Head)


class StreamedAnswer:
    """One streamed answer to `/generate`, from server-sent events.

    Args:
        where: engine and request, for error messages.

    Attributes:
        num_tokens: tokens that have arrived.
        is_finished: the last piece has arrived.
        pieces: what has arrived, for `parse_generate`: JSON objects that hold each token once.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.restart()

    def restart(self) -> None:
        """Forget everything: the request is sent anew."""
        self.num_tokens = 0
        self.is_finished = False
        self.pieces: list[bytes] = []
        self._rest = bytearray()
        self._version: str | None = None
        self._spans: list[Span] = []
        self._num_known = 0

    def feed(self, block: bytes) -> None:
        """Take the next bytes of the body, cut anywhere.

        Raises:
            MalformedAnswer: an event is no piece of an answer.
            StatusInStream: the engine says that it failed.
        """
        looked_at = max(0, len(self._rest) - 1)
        self._rest += block
        start = 0
        while (end := self._rest.find(END_OF_EVENT, max(start, looked_at))) >= 0:
            event = bytes(memoryview(self._rest)[start:end]).strip()
            start = end + len(END_OF_EVENT)
            if event.startswith(PREFIX):
                self._take(event[len(PREFIX) :].strip())
        del self._rest[:start]

    def kept(self, *, max_new_tokens: int, oldest_version: int | None) -> GenerateResult | None:
        """What there is of an answer that broke off, as an aborted one; None when that is nothing.

        Raises:
            MalformedAnswer, WrongVersion: as `parse_generate`.
        """
        if not self._num_known:
            return None
        answer = decode_pieces(self.pieces, self._where)
        meta = answer.meta_info
        answer.output_ids = answer.output_ids[: self._num_known]
        meta.output_token_logprobs = (meta.output_token_logprobs or [])[: self._num_known]
        meta.weight_versions = self._spans
        meta.finish_reason = Finish("abort")
        answer.text = ""
        return check_generate(
            answer,
            where=self._where,
            max_new_tokens=max_new_tokens,
            num_prompt_tokens=0,
            oldest_version=oldest_version,
        )

    def _take(self, event: bytes) -> None:
        if event == DONE:
            return
        try:
            head = _decoder.decode(event)
        except msgspec.DecodeError as error:
            raise self._malformed(str(error), event) from error
        if head.error is not None:
            raise _failure(head.error)
        if head.meta_info is None:
            raise self._malformed("no meta_info", event)
        finish = head.meta_info.finish_reason
        if finish is not None and finish.status_code is not None:
            raise _failure({"code": finish.status_code, "message": finish.message or ""})
        self._note_tokens(head, head.meta_info, event)
        self._note_versions(head.meta_info)
        self.is_finished = finish is not None

    def _note_tokens(self, head: _Head, meta: _HeadMeta, event: bytes) -> None:
        number = len(head.output_ids)
        total = number if meta.completion_tokens is None else meta.completion_tokens
        if number == total:
            self.pieces = [event]
        elif number == total - self.num_tokens:
            self.pieces.append(event)
        elif meta.finish_reason is not None and total == self.num_tokens:
            # SGLang in increments, of a request that is aborted in the queue: the last token and
            # all log-probs come again.
            self.pieces.append(_without_tokens(event))
        else:
            found = f"{number} token ids, after {self.num_tokens} of {total}"
            raise self._malformed(found, event)
        self.num_tokens = total

    def _note_versions(self, meta: _HeadMeta) -> None:
        version, was_known = meta.weight_version, self._version is not None
        if meta.weight_versions is not None:
            self._spans, self._num_known = meta.weight_versions, self.num_tokens
        elif version is not None and (not was_known or version == self._version):
            self._spans, self._num_known = [Span(version, 0, self.num_tokens)], self.num_tokens
            self._version = version
        else:
            self._version = ""  # equals no version: from here on nobody knows

    def _malformed(self, found: str, event: bytes) -> MalformedAnswer:
        return MalformedAnswer(
            "the engine streamed something that is no piece of an answer",
            where=self._where,
            expected="a JSON object with output_ids and meta_info",
            found=f"{found}; it begins {event[:80]!r}",
        )


def _without_tokens(event: bytes) -> bytes:
    """The piece without what it says of tokens that came before."""
    piece = orjson.loads(event)
    piece["output_ids"] = piece["meta_info"]["output_token_logprobs"] = []
    return orjson.dumps(piece)


def _failure(error: Any) -> StatusInStream:
    """What an event with an error instead of a piece means."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and code >= 400 else FAILED
    return StatusInStream(status, orjson.dumps({"error": error}))
