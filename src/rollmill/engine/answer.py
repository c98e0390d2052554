"""The JSON of `/generate` answers, as typed values whose contents nobody has checked yet.

Only the fields that somebody reads are here; others are skipped, not converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollmill.engine.errors import MalformedAnswer


class Finish(msgspec.Struct):
    """Why writing stopped; with a status code when it was the engine's failure."""

    type: str
    status_code: int | None = None
    message: str | None = None


class Span(msgspec.Struct):
    """Output positions from `start` to `end` (excluded) and the version that wrote them."""

    version: str
    start: int
    end: int


class Written(msgspec.Struct, array_like=True, gc=False):
    """`[log_prob, token, text]`. Answers have thousands: the garbage collector is kept off them."""

    log_prob: float
    token: int
    text: Any


class Read(msgspec.Struct, array_like=True, gc=False):
    """The same for a token of the context; the first one has no log-prob."""

    log_prob: float | None
    token: int
    text: Any


class Meta(msgspec.Struct):
    """What an answer says about itself."""

    finish_reason: Finish | None
    output_token_logprobs: list[Written] | None = None
    input_token_logprobs: list[Read] | None = None
    weight_versions: list[Span] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    spec_num_proposed_drafts: int = 0
    spec_num_correct_drafts: int = 0
    routed_experts: str | None = None


class Answer(msgspec.Struct):
    """An answer of `/generate` as it came: of the right shape, with contents unchecked."""

    output_ids: list[int]
    meta_info: Meta
    text: str = ""


_decoder = msgspec.json.Decoder(Answer)


def decode_answer(body: bytes, where: str) -> Answer:
    """The answer in the bytes of one JSON object.

    Raises:
        MalformedAnswer: it has another shape.
    """
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise MalformedAnswer(
            "the engine's answer is not a valid /generate response",
            where=where,
            expected="a JSON object with output_ids and meta_info",
            found=f"{error}; the answer begins {body[:80]!r}",
        ) from error


def decode_pieces(pieces: Sequence[bytes], where: str) -> Answer:
    """One answer from the pieces of a stream that hold each token once, in order.

    Several pieces have no text together: the end of an answer (a stop string, say) may take back
    text that was sent before.

    Raises:
        MalformedAnswer: there is none, or one has another shape.
    """
    answers = [decode_answer(piece, where) for piece in pieces]
    if not answers:
        raise MalformedAnswer("the engine streamed nothing", where=where)
    if len(answers) == 1:
        return answers[0]
    whole = answers[-1]
    log_probs = [answer.meta_info.output_token_logprobs for answer in answers]
    # `or []`: a piece without log-probs makes the numbers differ, which is found later
    whole.meta_info.output_token_logprobs = [entry for part in log_probs for entry in part or []]
    whole.output_ids = [token for answer in answers for token in answer.output_ids]
    whole.text = ""
    return whole
