from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.engine.errors import EngineCallError, MalformedAnswer, WrongVersion
from rollmill.engine.parse import parse_generate, parse_score, parse_version
from rollmill.engine.types import FinishReason, VersionSpan
from rollmill.sample import int_array


def answer(ids: list[int], **meta: Any) -> dict[str, Any]:
    return {
        "text": "x",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 4,
            "cached_tokens": 3,
            "num_retractions": 1,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}],
            **meta,
        },
    }


def parse(raw: dict[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": 10, "num_prompt_tokens": 4} | options
    return parse_generate(orjson.dumps(raw), where="here", **options)


def test_a_recorded_answer_of_sglang_is_read() -> None:
    body = (
        b'{"text":"The phrase","output_ids":[504,8715],"meta_info":{"id":"efb6","finish_reason":'
        b'{"type":"length","length":2},"prompt_tokens":10,"weight_version":"0",'
        b'"num_retractions":0,"queue_time":0.0005,"input_token_logprobs":[],'
        b'"output_token_logprobs":[[-1.8556392192840576,504,null],[-3.0553855895996094,8715,null]],'
        b'"output_token_logprobs_length":2,"reasoning_tokens":0,"completion_tokens":2,'
        b'"cached_tokens":9,"weight_versions":[{"version":"0","start":0,"end":2}],'
        b'"cached_tokens_details":{"device":9,"host":0},"dp_rank":null,"e2e_latency":0.39}}'
    )
    result = parse_generate(body, where="here", max_new_tokens=2, num_prompt_tokens=10)
    assert result.token_ids.tolist() == [504, 8715]
    np.testing.assert_array_equal(
        result.log_probs, np.array([-1.8556392192840576, -3.0553855895996094], np.float32)
    )
    assert result.finish is FinishReason.LENGTH
    assert result.spans == (VersionSpan(0, 0, 2),)
    assert (result.counters.prompt_tokens, result.counters.cached_tokens) == (10, 9)


def test_spans_of_several_versions_become_segments_in_order() -> None:
    spans = [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 2},
        {"version": "5", "start": 2, "end": 5},
    ]
    result = parse(answer([1, 2, 3, 4, 5], weight_versions=spans))
    assert result.versions == (3, 5)
    assert [(s.weight_version, len(s)) for s in result.to_segments()] == [(3, 2), (5, 3)]


def test_an_empty_abort_from_the_queue_is_fine() -> None:
    raw = {
        "output_ids": [],
        "text": "",
        "meta_info": {
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "v3",
        },
    }
    assert parse(raw, oldest_version=3).is_aborted


def test_rounding_above_zero_is_taken_as_zero_but_no_more() -> None:
    logprobs = [[1e-6, 1, None], [-0.0, 2, None]]
    assert parse(answer([1, 2], output_token_logprobs=logprobs)).log_probs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"finish_reason": None}, "one of stop, length, abort"),
        ({"finish_reason": {"type": "eos"}}, "one of stop, length, abort"),
        ({"output_token_logprobs": None}, "return_logprob"),
        ({"output_token_logprobs": [[-1.0, 1, None]]}, "2 log-probs, one per token"),
        ({"output_token_logprobs": [[-1.0, 1, None], [-1.0, 9, None]]}, "token 2 at position 1"),
        ({"output_token_logprobs": [[-1.0, 1, None], [0.5, 2, None]]}, "none above 0"),
        ({"output_token_logprobs": [[-1.0, 1, None], [-1e300, 2, None]]}, "finite"),
        ({"output_token_logprobs": [[-1.0, 1, None], [None, 2, None]]}, "JSON object"),
        ({"weight_versions": None}, "from 0 to 2"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 1}]}, "from 0 to 2"),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 2}]}, "from 0 to 2"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 3}]}, "from 0 to 2"),
        (
            {
                "weight_versions": [
                    {"version": "7", "start": 0, "end": 2},
                    {"version": "8", "start": 1, "end": 2},
                ]
            },
            "from 0 to 2",
        ),
    ],
)
def test_what_breaks_the_protocol_is_refused_with_what_was_expected(
    change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(MalformedAnswer) as caught:
        parse(answer([1, 2], **change))
    assert expected in (caught.value.expected or "")
    assert caught.value.found
    assert caught.value.where == "here"


def test_more_tokens_than_asked_for_are_refused() -> None:
    assert parse(answer([1, 2]), max_new_tokens=2).num_tokens == 2
    with pytest.raises(MalformedAnswer, match="at most 1 tokens"):
        parse(answer([1, 2]), max_new_tokens=1)


@pytest.mark.parametrize("token", [-1, 2**31])
def test_impossible_token_ids_are_refused(token: int) -> None:
    with pytest.raises(MalformedAnswer, match="impossible token id"):
        parse(answer([1, token]))


def test_versions_are_whole_numbers() -> None:
    assert parse_version("12", allow_initial=False, where="here") == 12
    assert parse_version("default", allow_initial=True, where="here") == 0
    for text in ("default", "v3", "-1", "", "1.0", "٣"):
        with pytest.raises(WrongVersion):
            parse_version(text, allow_initial=False, where="here")


def test_routed_experts_are_decoded_to_positions_layers_experts() -> None:
    # Recorded from a mixture-of-experts model: 4 prompt + 3 output tokens, 2 layers, top 2.
    text = (
        "AwAAAAUAAAABAAAABAAAAAAAAAAGAAAAAQAAAAQAAAADAAAABQAAAAQAAAAAAAAABQAAAAYAAAAEAAAAAQAAAAUAAAAD"
        "AAAAAgAAAAQAAAAGAAAAAAAAAAEAAAAEAAAA"
    )
    result = parse(answer([1, 2, 3], routed_experts=text), experts_shape=(2, 2))
    assert result.routed_experts.shape == (6, 2, 2)
    assert result.routed_experts[0].tolist() == [[3, 5], [1, 4]]
    short = base64.b64encode(np.zeros(5, "<i4").tobytes()).decode()
    with pytest.raises(MalformedAnswer, match="6 positions"):
        parse(answer([1, 2, 3], routed_experts=short), experts_shape=(2, 2))
    with pytest.raises(MalformedAnswer, match="cannot be decoded"):
        parse(answer([1, 2, 3], routed_experts="%%%"), experts_shape=(2, 2))


def test_routed_experts_that_were_asked_for_are_never_left_out_silently() -> None:
    with pytest.raises(MalformedAnswer, match="--enable-return-routed-experts"):
        parse(answer([1, 2, 3]), experts_shape=(2, 2))
    aborted = answer([], finish_reason={"type": "abort", "message": "Aborted"})
    assert parse(aborted, experts_shape=(2, 2)).routed_experts is None
    assert parse(answer([1, 2, 3])).routed_experts is None


def test_scores_are_the_last_input_log_probs() -> None:
    entries = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    raw = orjson.dumps(answer([], input_token_logprobs=entries))
    assert parse_score(raw, int_array([6, 7]), where="here").tolist() == [-1.0, -2.0]
    masked = orjson.dumps(answer([], input_token_logprobs=[[-1.0, 6, None], [-2.0, 0, None]]))
    assert parse_score(masked, int_array([6, 63]), where="here").tolist() == [-1.0, -2.0]
    with pytest.raises(MalformedAnswer, match="no log-prob"):
        parse_score(raw, int_array([5, 6, 7]), where="here")
    with pytest.raises(MalformedAnswer, match="too few"):
        parse_score(raw, int_array([4, 5, 6, 7]), where="here")
    with pytest.raises(MalformedAnswer, match="other tokens"):
        parse_score(raw, int_array([6, 8]), where="here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.binary() | JSON.map(lambda value: repr(value).encode()))
def test_garbage_is_an_engine_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(EngineCallError):
        parse_generate(body, where="here", max_new_tokens=5, num_prompt_tokens=1)


@given(
    st.sampled_from(["finish_reason", "output_token_logprobs", "weight_versions", "prompt_tokens"]),
    JSON,
)
def test_any_field_of_any_type_gives_a_result_or_an_engine_error(field: str, value: Any) -> None:
    try:
        body = orjson.dumps(answer([1, 2], **{field: value}))
    except TypeError:  # an integer too large for JSON here
        return
    try:
        result = parse_generate(body, where="here", max_new_tokens=5, num_prompt_tokens=1)
    except EngineCallError:
        return
    assert len(result.log_probs) == result.num_tokens
