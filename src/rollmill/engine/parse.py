"""Answers of `/generate`, from bytes to checked values. Pure: no I/O, no state.

Engines are other people's programs and can be old, patched or broken, so nothing of an answer is
believed before it is checked: its shape in `engine/answer.py`, its content here. A failed check is
a `MalformedAnswer` (or `WrongVersion`) that says what was expected and what was found.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np

from rollmill.engine.answer import Answer, Finish, Span, Written, decode_answer, decode_pieces
from rollmill.engine.errors import MalformedAnswer, WrongVersion
from rollmill.engine.types import FinishReason, GenerateResult, VersionSpan
from rollmill.sample import EngineCounters, FloatArray, IntArray, float_array, int_array

INITIAL_VERSION = "default"
"""What SGLang calls weights that nobody has numbered yet."""

LOG_PROB_SLACK = 1e-3
"""A log-prob may exceed 0 by this much (half-precision rounding); it is then taken as 0."""

LOWEST_LOG_PROB = -1e30
"""Below this is no log-prob but a stand-in for minus infinity."""


def parse_generate(
    body: bytes | Sequence[bytes],
    *,
    where: str,
    max_new_tokens: int,
    num_prompt_tokens: int,
    oldest_version: int | None = None,
    experts_shape: tuple[int, int] | None = None,
) -> GenerateResult:
    """Check and convert the answer to one `/generate` call.

    Args:
        body: the response body; or the pieces of a streamed one, in order, each token once.
        where: engine and request, for error messages.
        max_new_tokens: as asked; more is an error.
        num_prompt_tokens: as sent; needed for the shape of routed experts.
        oldest_version: when given, no token may be of an earlier version; None allows any whole
            number, and reads SGLang's initial "default" as 0.
        experts_shape: (layers, top_k) of the model, when its routed experts were asked for; None
            leaves them undecoded.

    Raises:
        MalformedAnswer: the answer breaks the protocol or the invariants of `GenerateResult`.
        WrongVersion: a version that is no whole number, or an older one than `oldest_version`.
    """
    return check_generate(
        decode_answer(body, where) if isinstance(body, bytes) else decode_pieces(body, where),
        where=where,
        max_new_tokens=max_new_tokens,
        num_prompt_tokens=num_prompt_tokens,
        oldest_version=oldest_version,
        experts_shape=experts_shape,
    )


def check_generate(
    answer: Answer,
    *,
    where: str,
    max_new_tokens: int,
    num_prompt_tokens: int,
    oldest_version: int | None = None,
    experts_shape: tuple[int, int] | None = None,
) -> GenerateResult:
    """Check and convert a decoded answer; arguments and errors as of `parse_generate`."""
    meta = answer.meta_info
    finish = _finish(meta.finish_reason, where)
    token_ids = _token_ids(answer.output_ids, max_new_tokens, where)
    if experts_shape is not None and meta.routed_experts is None:
        _check_absence_of_experts(finish, where)
    return GenerateResult(
        token_ids=token_ids,
        log_probs=_log_probs(meta.output_token_logprobs, token_ids, where),
        spans=_spans(meta.weight_versions, len(token_ids), oldest_version, where),
        finish=finish,
        text=answer.text,
        counters=EngineCounters(
            num_calls=1,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            retractions=meta.num_retractions,
            spec_draft_tokens=meta.spec_num_proposed_drafts,
            spec_accepted_tokens=meta.spec_num_correct_drafts,
        ),
        routed_experts=_routed_experts(
            meta.routed_experts, experts_shape, num_prompt_tokens + len(token_ids) - 1, where
        ),
    )


def parse_score(body: bytes, token_ids: IntArray, *, where: str) -> FloatArray:
    """Log-probs of given tokens from an answer that returned input log-probs.

    Args:
        body: the response body; its `input_token_logprobs` end with the tokens asked about.
        token_ids: int32 [S], the tokens whose log-probs are wanted.
        where: engine and request, for error messages.

    Raises:
        MalformedAnswer: log-probs are missing, of other tokens, or not finite.
    """
    entries = decode_answer(body, where).meta_info.input_token_logprobs
    if entries is None or len(entries) < len(token_ids):
        raise MalformedAnswer(
            "the engine returned too few input log-probs",
            where=where,
            expected=f"meta_info.input_token_logprobs with at least {len(token_ids)} entries",
            found="none" if entries is None else f"{len(entries)} entries",
        )
    wanted = entries[len(entries) - len(token_ids) :]
    if any(entry.log_prob is None for entry in wanted):
        raise MalformedAnswer(
            "the engine returned no log-prob for a token that has one",
            where=where,
            expected="a number for every token after the first",
            found="null",
        )
    # SGLang writes 0 for the last id of the vocabulary here (it takes it for image padding).
    ids = [entry.token or token for entry, token in zip(wanted, token_ids.tolist(), strict=True)]
    _check_same_tokens(ids, token_ids, where)
    return _checked_log_probs([entry.log_prob or 0.0 for entry in wanted], where)


def parse_version(text: str, *, allow_initial: bool, where: str) -> int:
    """A weight version as an integer; versions are decimal strings on the wire.

    Raises:
        WrongVersion: not a decimal number, or SGLang's initial name where that is not allowed.
    """
    if text == INITIAL_VERSION and allow_initial:
        return 0
    if text.isascii() and text.isdecimal():
        return int(text)
    raise WrongVersion(
        "the engine serves weights that this run did not number",
        where=where,
        expected="a weight version that is a whole number",
        found=repr(text),
        fix="start the engine with --weight-version 0, or let the run update its weights first",
    )


def _finish(reason: Finish | None, where: str) -> FinishReason:
    try:
        return FinishReason(reason.type if reason is not None else "")
    except ValueError:
        raise MalformedAnswer(
            "the engine gave an unknown finish reason",
            where=where,
            expected="one of " + ", ".join(reason.value for reason in FinishReason),
            found="null" if reason is None else repr(reason.type),
        ) from None


def _token_ids(ids: list[int], max_new_tokens: int, where: str) -> IntArray:
    if len(ids) > max_new_tokens:
        raise MalformedAnswer(
            "the engine wrote more tokens than asked for",
            where=where,
            expected=f"at most {max_new_tokens} tokens",
            found=f"{len(ids)} tokens",
        )
    try:
        token_ids = int_array(ids)
    except (ValueError, OverflowError):
        token_ids = None
    if token_ids is None or (len(token_ids) and int(token_ids.min()) < 0):
        raise MalformedAnswer(
            "the engine wrote an impossible token id",
            where=where,
            expected="token ids from 0 to 2147483647",
            found=f"{min(ids)} to {max(ids)}",
        )
    return token_ids


def _log_probs(entries: list[Written] | None, token_ids: IntArray, where: str) -> FloatArray:
    if entries is None and len(token_ids):
        raise MalformedAnswer(
            "the engine returned no log-probs",
            where=where,
            expected="meta_info.output_token_logprobs, as return_logprob was set",
            found="none",
        )
    entries = entries or []
    if len(entries) != len(token_ids):
        raise MalformedAnswer(
            "the engine's tokens and log-probs do not match in number",
            where=where,
            expected=f"{len(token_ids)} log-probs, one per token",
            found=f"{len(entries)} log-probs",
        )
    if not entries:
        return float_array([])
    _check_same_tokens([entry.token for entry in entries], token_ids, where)
    return _checked_log_probs([entry.log_prob for entry in entries], where)


def _check_same_tokens(ids: list[int], token_ids: IntArray, where: str) -> None:
    wanted = token_ids.tolist()
    if ids != wanted:
        position = next(i for i, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b)
        raise MalformedAnswer(
            "the engine's log-probs are of other tokens than it wrote",
            where=where,
            expected=f"token {token_ids[position]} at position {position}",
            found=f"token {ids[position]}",
        )


def _checked_log_probs(raw: list[float], where: str) -> FloatArray:
    values = np.array(raw, np.float64)
    is_bad = ~((values >= LOWEST_LOG_PROB) & (values <= LOG_PROB_SLACK))
    if is_bad.any():
        position = int(is_bad.argmax())
        raise MalformedAnswer(
            "the engine returned an impossible log-prob",
            where=where,
            expected="finite log-probs, none above 0",
            found=f"{values[position]} at position {position}",
        )
    return float_array(np.minimum(values, 0.0))


def _spans(
    spans: list[Span] | None, num_tokens: int, oldest_version: int | None, where: str
) -> tuple[VersionSpan, ...]:
    """The spans as values, empty ones left out; they must cover `num_tokens` in order."""
    position = 0
    result = []
    for span in spans or []:
        if span.start != position or span.end < span.start:
            raise _bad_spans(spans, num_tokens, where)
        position = span.end
        if span.end > span.start:
            version = parse_version(span.version, allow_initial=oldest_version is None, where=where)
            result.append(VersionSpan(version, span.start, span.end))
    if position != num_tokens:
        raise _bad_spans(spans, num_tokens, where)
    for kept in result:
        check_version(kept.version, oldest_version, None, where=where)
    return tuple(result)


def check_version(version: int, oldest: int | None, newest: int | None, *, where: str) -> None:
    """Raise `WrongVersion` unless `oldest` <= `version` <= `newest` (None: no bound)."""
    if (oldest is None or version >= oldest) and (newest is None or version <= newest):
        return
    if oldest == newest or newest is None:
        expected = f"weight version {oldest}" + (" or later" if newest is None else "")
    else:
        expected = f"a weight version from {oldest or 0} to {newest}"
    raise WrongVersion(
        "the engine wrote tokens with other weights than expected",
        where=where,
        expected=expected,
        found=f"weight version {version}",
    )


def _bad_spans(spans: list[Span] | None, num_tokens: int, where: str) -> MalformedAnswer:
    found = [(span.version, span.start, span.end) for span in spans or []]
    return MalformedAnswer(
        "the engine's weight versions do not cover its tokens",
        where=where,
        expected=f"meta_info.weight_versions: spans that follow each other from 0 to {num_tokens}",
        found=str(found),
    )


def _check_absence_of_experts(finish: FinishReason, where: str) -> None:
    """Only an answer that was aborted may have none: its prompt may not have been computed.

    Raises:
        MalformedAnswer: it was not.
    """
    if finish is not FinishReason.ABORT:
        raise MalformedAnswer(
            "the engine returned no routed experts",
            where=where,
            expected="meta_info.routed_experts, as return_routed_experts was set",
            found="none",
            fix="start SGLang with --enable-return-routed-experts, or set "
            "engine.return_routed_experts to false",
        )


def _routed_experts(
    text: str | None, shape: tuple[int, int] | None, num_positions: int, where: str
) -> IntArray | None:
    """Base64 of little-endian int32 [positions, layers, top_k]."""
    if text is None or shape is None:
        return None
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise MalformedAnswer(
            "the engine's routed experts cannot be decoded", where=where, found=str(error)
        ) from error
    if flat.size != num_positions * shape[0] * shape[1]:
        raise MalformedAnswer(
            "the engine's routed experts have the wrong size",
            where=where,
            expected=f"{num_positions} positions × {shape[0]} layers × {shape[1]} experts",
            found=f"{flat.size} numbers",
        )
    return flat.astype(np.int32).reshape(num_positions, *shape)
