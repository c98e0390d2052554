"""When engines hardly change, it is said: once, and again when it gets worse."""

from __future__ import annotations

import pytest

from rollmill.weights.swallowed import SwallowWatch


def test_a_small_share_is_told_once_and_again_when_it_halves() -> None:
    watch = SwallowWatch("bfloat16")
    shares = [None, 0.2, 0.009, 0.008, 0.005, 0.0046, 0.004, 0.3, 0.0044, 0.0]
    told = [watch.update(share) for share in shares]
    assert [share for share, warning in zip(shares, told, strict=True) if warning] == [
        0.009,
        0.004,
        0.0,
    ]
    assert told[2] is not None
    assert "0.90% of the engines' bfloat16 weights" in told[2]


@pytest.mark.parametrize("share", [None, 0.0, 0.001])
def test_float32_swallows_nothing(share: float | None) -> None:
    assert SwallowWatch("float32").update(share) is None
