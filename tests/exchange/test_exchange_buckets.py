from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmill.exchange.buckets import flatten, specs_of, unflatten
from rollmill.exchange.checksum import checksum_of, total_of, without_ties
from rollmill.exchange.specs import ITEM_SIZES, WeightSpec, plan_buckets

SPECS = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "int64"]), st.integers(0, 50)), max_size=30
)


@given(SPECS, st.integers(1, 300))
def test_every_weight_is_in_one_bucket_of_its_precision(
    sizes: list[tuple[str, int]], max_bytes: int
) -> None:
    specs = [WeightSpec(str(i), dtype, (n,)) for i, (dtype, n) in enumerate(sizes)]
    buckets = plan_buckets(specs, max_bytes)
    sent = sorted(spec.name for bucket in buckets for spec in bucket)
    assert sent == sorted(spec.name for spec in specs if spec.num_bytes)
    for bucket in buckets:
        assert len({spec.dtype for spec in bucket}) == 1
        assert len(bucket) == 1 or sum(spec.num_bytes for spec in bucket) <= max_bytes


def test_a_bucket_gives_back_its_weights() -> None:
    weights = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7).bfloat16(),
        "c": torch.ones(()),
    }
    for bucket in plan_buckets(specs_of(weights), 1 << 20):
        back = unflatten(bucket, flatten(bucket, weights))
        for name, tensor in back.items():
            assert torch.equal(tensor, weights[name])
    with pytest.raises(ValueError, match="not what its weights need"):
        unflatten(specs_of(weights), torch.zeros(3, dtype=torch.uint8))


def test_mixed_precisions_that_do_not_lie_right_are_refused() -> None:
    weights = {"a": torch.ones(1).bfloat16(), "b": torch.ones(1)}
    specs = specs_of(weights)
    with pytest.raises(ValueError, match="multiple of 4"):
        unflatten(specs, flatten(specs, weights))


def test_item_sizes_are_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_SIZES} == ITEM_SIZES


def test_checksums_see_every_bit_and_every_name() -> None:
    tensor = torch.zeros(1000)
    other = tensor.clone()
    other[77] = -0.0  # equal as a number
    assert checksum_of(tensor) != checksum_of(other)
    assert checksum_of(tensor) == checksum_of(torch.zeros(10, 100))
    assert total_of({"a": "1", "b": "2"}) == total_of({"b": "2", "a": "1"})
    assert total_of({"a": "1", "b": "2"}) != total_of({"a": "2", "b": "1"})


def test_tied_weights_are_taken_once() -> None:
    shared = torch.zeros(4)
    kept = without_ties([("first", shared), ("second", shared), ("other", torch.zeros(4))])
    assert list(kept) == ["first", "other"]
