from __future__ import annotations

import pytest

from rollmill.engine.weight_calls import WeightSums
from rollmill.errors import EngineError
from rollmill.weights.sums import TrainerSums, check_sums

OURS = TrainerSums({"a": "1", "b": "2"}, {"a": "bfloat16", "b": "bfloat16"}, "crc32")
DTYPES = {"a": "bfloat16", "b": "bfloat16"}


def embedded(total: str = "t", **sums: str) -> WeightSums:
    return WeightSums(total, {"a": "1", "b": "2"} | sums, "crc32", DTYPES)


def test_an_engine_with_the_trainers_checksums_passes() -> None:
    check_sums({"x": embedded(), "y": embedded()}, OURS)


def test_an_engine_with_another_weight_is_named_with_the_weight() -> None:
    with pytest.raises(EngineError, match="other weights than the trainer sent") as caught:
        check_sums({"x": embedded(), "y": embedded("u", b="3")}, OURS)
    assert "y" in str(caught.value.where)
    assert "1 that differ: b" in str(caught.value.found)


def test_a_weight_that_is_missing_differs() -> None:
    with pytest.raises(EngineError, match="1 that differ: b"):
        check_sums({"x": WeightSums("t", {"a": "1"}, "crc32", DTYPES)}, OURS)


def test_a_weight_that_the_engine_keeps_in_another_precision_is_left_out() -> None:
    sums = WeightSums("t", {"a": "1", "b": "9"}, "crc32", DTYPES | {"b": "float32"})
    check_sums({"x": sums}, OURS)


def test_engines_of_one_kind_are_compared_with_each_other_and_not_with_other_kinds() -> None:
    one, other = WeightSums("t"), WeightSums("u")
    check_sums({"x": one, "y": one, "z": embedded()}, OURS)
    with pytest.raises(EngineError, match="different weights"):
        check_sums({"x": one, "y": other}, OURS)
