"""What the engine answers: the JSON objects of SGLang's `/generate`.

A response describes the first `count` output tokens of a sequence, so that a streamed chunk and
the final answer come from the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from rollmill.engine.embedded.experts import encode_experts
from rollmill.engine.embedded.sampling import SamplingParams
from rollmill.engine.embedded.sequence import Sequence, TopLogprobs

TokenText = Callable[[int], str]


class TextReader:
    """Turns a sequence's tokens into the text that its reader gets."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is text at all."""
        return self._tokenizer is not None

    def token(self, token: int) -> str:
        """The text of one token."""
        return str(self._tokenizer.decode([token])) if self._tokenizer is not None else ""

    def text(self, sequence: Sequence, count: int) -> str:
        """Text of the first `count` output tokens, without what ended it (unless it is kept)."""
        if self._tokenizer is None:
            return ""
        params, is_all = sequence.params, count == len(sequence.output)
        reason = sequence.finish_reason if is_all else None
        tokens = sequence.output[:count]
        if reason and isinstance(reason.get("matched"), int) and not params.no_stop_trim:
            tokens = tokens[:-1]
        text = self._decode(tokens, params)
        if reason and sequence.stop_text:
            at = text.find(sequence.stop_text)
            if at >= 0:
                text = text[: at + len(sequence.stop_text) if params.no_stop_trim else at]
        return text

    def piece(self, sequence: Sequence, start: int, end: int) -> str:
        """Text of output tokens `[start, end)`, for readers that put pieces together."""
        return self._decode(sequence.output[start:end], sequence.params)

    def _decode(self, tokens: list[int], params: SamplingParams) -> str:
        if self._tokenizer is None:
            return ""
        return str(
            self._tokenizer.decode(
                tokens,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        )


class StreamText:
    """Text of a growing sequence, at a cost that does not grow with it.

    Only the tokens since the last complete piece are decoded again; a piece is complete when it
    does not end inside a character. The final text is decoded as a whole, so that a stream ends
    with exactly the text that a single answer has.
    """

    def __init__(self, reader: TextReader, sequence: Sequence) -> None:
        self._reader = reader
        self._sequence = sequence
        self._done = 0
        self._context = 0
        self.text = ""

    def advance(self, count: int, *, is_end: bool) -> str:
        """Take the tokens up to `count`; the text that is new."""
        before = self.text
        if is_end:
            self.text = self._reader.text(self._sequence, count)
            # An ending that is cut off (a stop string) may take back what was sent already.
            return self.text[len(before) :]
        # The tokens of the piece before give the decoder its context (leading spaces).
        known = self._reader.piece(self._sequence, self._context, self._done)
        longer = self._reader.piece(self._sequence, self._context, count)
        if len(longer) > len(known) and not longer.endswith("\ufffd"):
            self.text += longer[len(known) :]
            self._context, self._done = self._done, count
        return self.text[len(before) :]


def generate_response(
    sequence: Sequence,
    count: int,
    reader: TextReader,
    *,
    start: int = 0,
    text: str | None = None,
    with_token_text: bool = False,
    with_prompt_ids: bool = False,
) -> dict[str, Any]:
    """The answer for one sequence after `count` tokens.

    Args:
        sequence: what is written.
        count: output tokens so far.
        reader: makes text of tokens.
        start: tokens before this one are left out: they were sent already.
        text: the text, when it is known already.
        with_token_text: log-probs come with their token's text.
        with_prompt_ids: the prompt's token ids are part of the answer.
    """
    answer: dict[str, Any] = {}
    if reader.has_tokenizer:
        answer["text"] = reader.text(sequence, count) if text is None else text
    answer["output_ids"] = sequence.output[start:count]
    answer["meta_info"] = _meta_info(sequence, count)
    if sequence.finish_reason is not None and count == len(sequence.output):
        experts = encode_experts(sequence, count)
        if experts is not None:
            answer["meta_info"]["routed_experts"] = experts
    if sequence.logprobs.is_wanted:
        token_text = reader.token if with_token_text else None
        answer["meta_info"] |= _logprobs(sequence, start, count, token_text)
    if with_prompt_ids:
        answer["prompt_token_ids"] = sequence.prompt
    return answer


def _meta_info(sequence: Sequence, count: int) -> dict[str, Any]:
    is_end = sequence.finish_reason is not None and count == len(sequence.output)
    cached = sequence.cached_tokens or 0
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason if is_end else None,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": _version_at(sequence, count),
        "num_retractions": sequence.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
        "request_received_ts": sequence.received_at,
        "response_sent_to_client_ts": time.time(),
    }
    if sequence.first_token_at is not None:
        meta["first_token_latency"] = sequence.first_token_at - sequence.received_at
    if is_end:
        meta["weight_versions"] = version_spans(sequence, count)
        finished_at = sequence.finished_at or time.time()
        meta["e2e_latency"] = finished_at - sequence.received_at
        meta["request_finished_ts"] = finished_at
    return meta


def version_spans(sequence: Sequence, count: int) -> list[dict[str, Any]]:
    """Which weight version wrote which of the first `count` output positions."""
    spans = [span for span in sequence.spans if span.start < count]
    if not spans:
        return [{"version": sequence.weight_version, "start": 0, "end": 0}]
    return [
        {"version": span.version, "start": span.start, "end": min(span.end, count)}
        for span in spans
    ]


def _version_at(sequence: Sequence, count: int) -> str:
    """The version that wrote the last of `count` tokens; later ones may be there already."""
    return str(version_spans(sequence, count)[-1]["version"])


def _logprobs(sequence: Sequence, start: int, count: int, text: TokenText | None) -> dict[str, Any]:
    wanted = sequence.logprobs
    values, tokens = sequence.output_logprobs[start:count], sequence.output[start:count]
    outputs = zip(values, tokens, strict=True)
    found: dict[str, Any] = {
        "input_token_logprobs": _input_triples(sequence, text),
        "output_token_logprobs": _triples(outputs, text),
        "output_token_logprobs_length": count,
    }
    noted = sequence.input_logprobs
    if wanted.num_top:
        found["input_top_logprobs"] = _input_lists(sequence, noted.top, text)
        found["output_top_logprobs"] = [_triples(t, text) for t in sequence.output_top[start:count]]
    if wanted.token_ids:
        found["input_token_ids_logprobs"] = _input_lists(sequence, noted.by_id, text)
        found["output_token_ids_logprobs"] = [
            _triples(t, text) for t in sequence.output_by_id[start:count]
        ]
    return found


def _input_triples(sequence: Sequence, text: TokenText | None) -> list[list[Any]]:
    """Prompt tokens from `start_len` on; the first has no log-prob, as in SGLang."""
    if not sequence.logprobs.wants_input:
        return []
    start = sequence.logprobs.start_len
    chosen = list(sequence.input_logprobs.chosen)
    tokens = sequence.prompt[start : start + 1 + len(chosen)]
    return [
        [value, token, text(token) if text else None]
        for value, token in zip([None, *chosen], tokens, strict=True)
    ]


def _input_lists(
    sequence: Sequence, noted: list[TopLogprobs], text: TokenText | None
) -> list[list[list[Any]] | None]:
    if not sequence.logprobs.wants_input:
        return []
    return [None, *(_triples(position, text) for position in noted)]


def _triples(pairs: Iterable[tuple[float, int]], text: TokenText | None) -> list[list[Any]]:
    return [[value, token, text(token) if text else None] for value, token in pairs]
