"""Samples survive bytes and Parquet rows unchanged."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollmill.errors import DataError
from rollmill.sample import EngineCounters, Group, Sample, Segment, Status
from rollmill.sample_codec import (
    decode_group,
    decode_sample,
    encode_group,
    encode_sample,
    row_schema,
    row_to_sample,
    sample_to_row,
)

TOKENS = hnp.arrays(np.int32, st.integers(0, 5), elements=st.integers(0, 2**31 - 1))
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3)
ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(d) for d in ("<f4", "<f8", "<i8", "<u1", "?", "<f2")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    token_ids = draw(TOKENS)
    bits = draw(hnp.arrays(np.uint32, len(token_ids)))
    floats = bits.view(np.float32)
    log_probs = np.where(np.isnan(floats), np.float32(np.nan), floats)
    if draw(st.booleans()):
        return Segment(token_ids, log_probs, draw(st.booleans()), draw(st.integers(0, 9)), "engine")
    return Segment(token_ids, None, False, draw(st.none() | st.integers(0, 9)), "environment")


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    parts = draw(st.lists(segments(), max_size=3))
    length = sum(len(part) for part in parts)
    return Sample(
        prompt_tokens=draw(TOKENS),
        index=draw(st.integers(0, 2**62)),
        group_index=draw(st.integers(0, 2**62)),
        attempt=draw(st.integers(0, 9)),
        prompt=draw(TEXT | st.lists(OBJECTS, max_size=2)),
        label=draw(JSON_VALUES),
        metadata=draw(OBJECTS),
        segments=parts,
        response=draw(TEXT),
        status=draw(st.sampled_from(list(Status))),
        failure=draw(st.none() | TEXT),
        reward=draw(st.none() | st.floats(allow_nan=False) | st.just({"score": 0.5, "form": 1.0})),
        reward_outcome=draw(st.none() | st.just("value")),
        reward_detail=draw(st.none() | TEXT),
        in_loss=draw(st.booleans()),
        session_id=draw(st.none() | st.just("s")),
        timing=draw(st.dictionaries(TEXT, st.floats(0, 1e6), max_size=2)),
        counters=EngineCounters(*draw(st.tuples(*[st.integers(0, 99)] * 6))),
        teacher_log_probs=draw(st.none() | hnp.arrays(np.float32, length)),
        multimodal_inputs=draw(st.none() | st.dictionaries(TEXT, ARRAYS, max_size=2)),
        routed_experts=draw(st.none() | hnp.arrays(np.int32, (2, 1, 3))),
    )


@given(samples())
def test_a_sample_survives_bytes(sample: Sample) -> None:
    assert decode_sample(encode_sample(sample)) == sample


@given(st.lists(samples(), max_size=3), st.integers(0, 2**40))
@settings(max_examples=30)
def test_a_group_survives_bytes(members: list[Sample], group_index: int) -> None:
    assert decode_group(encode_group(Group(group_index, members))) == Group(group_index, members)


@given(samples())
@settings(max_examples=50)
def test_a_sample_survives_a_parquet_file(
    tmp_path_factory: pytest.TempPathFactory, sample: Sample
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([sample_to_row(sample)], schema=row_schema()), path)
    (row,) = pq.read_table(path).to_pylist()
    assert row_to_sample(row) == sample


def test_samples_of_a_group_share_the_prompt_on_both_sides() -> None:
    prompt = np.arange(1000, dtype=np.int32)
    members = [Sample(prompt_tokens=prompt, attempt=attempt) for attempt in range(8)]
    data = encode_group(Group(3, members))
    assert len(data) < 2 * prompt.nbytes
    first, *rest = decode_group(data).samples
    assert all(sample.prompt_tokens is first.prompt_tokens for sample in rest)


def test_numpy_numbers_in_metadata_keep_their_type_in_bytes() -> None:
    sample = Sample(prompt_tokens=[1], metadata={"a": np.float32(0.1), "b": np.int64(3)})
    decoded = decode_sample(encode_sample(sample)).metadata
    assert decoded == {"a": np.float32(0.1), "b": 3}
    assert isinstance(decoded["a"], np.float32)


def test_none_and_empty_log_probs_stay_apart() -> None:
    known = Segment([], [], False, 1, "engine")
    unknown = Segment([], None, False, None, "environment")
    decoded = decode_sample(encode_sample(Sample(prompt_tokens=[], segments=[known, unknown])))
    assert [segment.log_probs is None for segment in decoded.segments] == [False, True]


def test_a_value_that_cannot_be_written_is_named() -> None:
    sample = Sample(prompt_tokens=[1], index=7, metadata={"when": object()})
    with pytest.raises(DataError, match="sample 7"):
        encode_sample(sample)
    with pytest.raises(DataError, match=r"metadata cannot be written[\s\S]*sample 7"):
        sample_to_row(sample)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x93\x07\xc4\x00\x90", b"\x93\x01\xc4\x00\x90"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        decode_sample(data)
    with pytest.raises(DataError):
        decode_group(data)


def test_a_row_whose_segments_do_not_cover_its_tokens_is_refused() -> None:
    row = sample_to_row(
        Sample(prompt_tokens=[1], segments=[Segment.from_engine([1, 2], [0, 0], 0)])
    )
    row["segments"][0]["length"] = 1
    with pytest.raises(DataError, match="cover 1 tokens"):
        row_to_sample(row)


def test_eight_thousand_tokens_take_under_a_fifth_of_a_millisecond_each_way() -> None:
    segment = Segment.from_engine(np.arange(8000), -np.ones(8000), 1)
    sample = Sample(prompt_tokens=np.arange(200), segments=[segment], metadata={"a": [1, 2, 3]})
    data = encode_sample(sample)
    assert _best_seconds(lambda: encode_sample(sample)) < 2e-4
    assert _best_seconds(lambda: decode_sample(data)) < 2e-4


def _best_seconds(action: object, repeats: int = 50) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return min(times)


def test_files_name_their_columns(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(
        [sample_to_row(Sample(prompt_tokens=[5], reward=0.5))], row_schema()
    )
    pq.write_table(table, tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet", columns=["score"]).to_pylist() == [{"score": 0.5}]
