"""What the engine answers: the JSON objects of SGLang's `/generate`.

A response describes the first `count` output tokens of a sequence, so that a streamed chunk and
the final answer come from the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

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
        text: str = self._tokenizer.decode(
            tokens,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        if reason and sequence.stop_text:
            at = text.find(sequence.stop_text)
            if at >= 0:
                text = text[: at + len(sequence.stop_text) if params.no_stop_trim else at]
        elif reason is None:
            text = text.removesuffix("\ufffd")  # the rest of the character is still to come
        return text


def generate_response(
    sequence: Sequence,
    count: int,
    reader: TextReader,
    *,
    with_token_text: bool = False,
    with_prompt_ids: bool = False,
) -> dict[str, Any]:
    """The answer for one sequence after `count` tokens."""
    answer: dict[str, Any] = {}
    if reader.has_tokenizer:
        answer["text"] = reader.text(sequence, count)
    answer["output_ids"] = sequence.output[:count]
    answer["meta_info"] = _meta_info(sequence, count)
    if sequence.logprobs.is_wanted:
        answer["meta_info"] |= _logprobs(sequence, count, reader.token if with_token_text else None)
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
        "weight_version": sequence.weight_version,
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
        meta["weight_versions"] = _version_spans(sequence)
        finished_at = sequence.finished_at or time.time()
        meta["e2e_latency"] = finished_at - sequence.received_at
        meta["request_finished_ts"] = finished_at
    return meta


def _version_spans(sequence: Sequence) -> list[dict[str, Any]]:
    if not sequence.spans:
        return [{"version": sequence.weight_version, "start": 0, "end": 0}]
    return [
        {"version": span.version, "start": span.start, "end": span.end} for span in sequence.spans
    ]


def _logprobs(sequence: Sequence, count: int, text: TokenText | None) -> dict[str, Any]:
    wanted = sequence.logprobs
    outputs = zip(sequence.output_logprobs[:count], sequence.output[:count], strict=True)
    found: dict[str, Any] = {
        "input_token_logprobs": _input_triples(sequence, text),
        "output_token_logprobs": _triples(outputs, text),
        "output_token_logprobs_length": count,
    }
    noted = sequence.input_logprobs
    if wanted.num_top:
        found["input_top_logprobs"] = _input_lists(sequence, noted.top, text)
        found["output_top_logprobs"] = [_triples(t, text) for t in sequence.output_top[:count]]
    if wanted.token_ids:
        found["input_token_ids_logprobs"] = _input_lists(sequence, noted.by_id, text)
        found["output_token_ids_logprobs"] = [
            _triples(t, text) for t in sequence.output_by_id[:count]
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
