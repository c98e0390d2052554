from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.engine.errors import MalformedAnswer
from rollmill.engine.http import StatusInStream
from rollmill.engine.parse import parse_generate
from rollmill.engine.stream import StreamedAnswer
from rollmill.engine.types import FinishReason, GenerateResult

IDS = [11, 12, 13, 14, 15, 16]
DONE = b"data: [DONE]\n\n"


def piece(
    end: int, start: int = 0, *, version: str = "3", finish: str | None = None, **meta: Any
) -> dict[str, Any]:
    """The piece after `end` tokens, with those from `start` on."""
    return {
        "text": f"text {start} to {end}",
        "output_ids": IDS[start:end],
        "meta_info": {
            "finish_reason": None if finish is None else {"type": finish},
            "completion_tokens": end,
            "weight_version": version,
            "output_token_logprobs": [[-t / 100, t, None] for t in IDS[start:end]],
            **meta,
        },
    }


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends)]
    return [{"version": v, "start": s, "end": e} for s, (v, e) in zip(starts, ends, strict=False)]


def events(*pieces: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(one) + b"\n\n" for one in pieces)


def fed(*pieces: dict[str, Any]) -> StreamedAnswer:
    answer = StreamedAnswer("here")
    answer.feed(events(*pieces))
    return answer


def whole(answer: StreamedAnswer) -> GenerateResult:
    return parse_generate(answer.pieces, where="here", max_new_tokens=6, num_prompt_tokens=2)


def kept(answer: StreamedAnswer) -> GenerateResult | None:
    return answer.kept(max_new_tokens=6, oldest_version=None)


CUMULATIVE = (piece(1), piece(4), piece(6, finish="stop", weight_versions=spans(("3", 6))))
INCREMENTAL = (piece(1), piece(4, 1), piece(6, 4, finish="stop", weight_versions=spans(("3", 6))))


@pytest.mark.parametrize(("pieces", "text"), [(CUMULATIVE, "text 0 to 6"), (INCREMENTAL, "")])
def test_both_ways_of_streaming_give_the_answer(pieces: Any, text: str) -> None:
    answer = fed(*pieces)
    assert answer.is_finished
    result = whole(answer)
    assert result.token_ids.tolist() == IDS
    assert [round(math.fabs(v) * 100) for v in result.log_probs.tolist()] == IDS
    assert result.finish is FinishReason.STOP
    assert result.text == text
    assert result.versions == (3,)


@given(st.lists(st.integers(0, len(events(*INCREMENTAL) + DONE)), max_size=8))
def test_the_bytes_may_be_cut_anywhere(cuts: list[int]) -> None:
    body = events(*INCREMENTAL) + DONE
    answer = StreamedAnswer("here")
    places = [0, *sorted(cuts), len(body)]
    for start, end in pairwise(places):
        answer.feed(body[start:end])
    assert whole(answer).token_ids.tolist() == IDS


@pytest.mark.parametrize("pieces", [CUMULATIVE[:2], INCREMENTAL[:2]])
def test_what_arrived_is_kept_up_to_the_last_complete_piece(pieces: Any) -> None:
    answer = fed(*pieces)
    answer.feed(events(piece(6, 4))[:-3])
    assert not answer.is_finished
    part = kept(answer)
    assert part is not None
    assert part.token_ids.tolist() == IDS[:4]
    assert part.is_aborted
    assert [(s.version, s.start, s.end) for s in part.spans] == [(3, 0, 4)]


def versions(part: GenerateResult | None) -> list[tuple[int, int, int]] | None:
    return None if part is None else [(s.version, s.start, s.end) for s in part.spans]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # One version per piece: which of tokens 2 to 4 are of version 4, nobody says.
        ((piece(1), piece(4, version="4")), [(3, 0, 1)]),
        ((piece(1), piece(4, version="4"), piece(5, version="4")), [(3, 0, 1)]),
        ((piece(1), piece(4, version="4"), piece(5, version="3")), [(3, 0, 1)]),
        # Spans with every piece: everything is known.
        (
            (piece(1), piece(4, 1, weight_versions=spans(("3", 2), ("4", 4)))),
            [(3, 0, 2), (4, 2, 4)],
        ),
        ((), None),
        ((piece(0),), None),
    ],
)
def test_only_tokens_of_a_known_version_are_kept(
    pieces: Sequence[dict[str, Any]], expected: list[tuple[int, int, int]] | None
) -> None:
    assert versions(kept(fed(*pieces))) == expected


def test_an_abort_in_the_queue_may_repeat_the_last_token_and_all_log_probs() -> None:
    """As SGLang ends, in increments, the stream of a request that a pause had put back."""
    last = piece(4, finish="abort", weight_versions=spans(("3", 4)))
    last["output_ids"] = IDS[3:4]
    answer = fed(piece(1), piece(4, 1), last)
    assert answer.is_finished
    result = whole(answer)
    assert result.is_aborted
    assert result.token_ids.tolist() == IDS[:4]
    assert versions(result) == [(3, 0, 4)]


def test_a_request_that_is_sent_anew_starts_afresh() -> None:
    answer = fed(piece(1), piece(4, 1))
    answer.feed(b"data: {")
    answer.restart()
    answer.feed(events(*CUMULATIVE))
    assert whole(answer).token_ids.tolist() == IDS


@pytest.mark.parametrize(
    "event",
    [
        b"data: {]\n\n",
        b'data: {"output_ids": [1]}\n\n',
        events(piece(4, 2)),  # token 2 is missing
        b'data: {"output_ids": "no", "meta_info": {}}\n\n',
    ],
)
def test_nonsense_is_an_error(event: bytes) -> None:
    answer = fed(piece(1))
    with pytest.raises(MalformedAnswer, match="streamed"):
        answer.feed(event)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"error": {"message": "too long", "code": 400}}, 400),
        ({"error": {"message": "?", "code": 200}}, 500),
        ({"error": "bad"}, 500),
        (
            {
                "output_ids": [],
                "meta_info": {
                    "finish_reason": {"type": "abort", "status_code": 503, "message": "full"}
                },
            },
            503,
        ),
    ],
)
def test_a_failure_inside_the_stream_is_that_failure(event: dict[str, Any], status: int) -> None:
    with pytest.raises(StatusInStream) as caught:
        fed(event)
    assert caught.value.status == status
