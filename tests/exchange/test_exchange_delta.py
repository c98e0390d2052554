from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import ModelError
from rollmill.exchange.checksum import checksums_of
from rollmill.exchange.delta import Side, apply_delta, read_delta, write_delta

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8]
Weights = dict[str, torch.Tensor]


def side(version: int, weights: Weights) -> Side:
    return Side(version, checksums_of(weights))


def delta(folder: Path, old: Weights, new: Weights) -> Path:
    path = folder / "d.delta"
    write_delta(path, old, new, side(1, old), side(2, new))
    return path


def bits(weights: Weights) -> dict[str, list[int]]:
    return {name: w.reshape(-1).view(torch.uint8).tolist() for name, w in weights.items()}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0, 1, 7, 300, 70_000]),
    share=st.sampled_from([0.0, 0.0001, 0.01, 0.3, 1.0]),
)
def test_any_number_of_deltas_gives_the_new_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    dtype: torch.dtype,
    size: int,
    share: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    folder = tmp_path_factory.mktemp("delta")

    def random() -> torch.Tensor:  # any bits, NaN and infinity among them
        whole = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator)
        return whole.to(torch.uint8).view(dtype)

    held = {"a": random(), "b": random().clone()}
    for _ in range(3):
        mask = torch.rand(size, generator=generator) < share
        new = {"a": torch.where(mask, random(), held["a"]), "b": held["b"]}
        found = read_delta(delta(folder, held, new))
        held = held | apply_delta(found, held)
        assert bits(held) == bits(new)


def test_few_changes_make_a_small_file(tmp_path: Path) -> None:
    old = {"w": torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = {"w": old["w"].clone()}
    new["w"][::100] *= 1.01
    assert delta(tmp_path, old, new).stat().st_size < 2_000_000 / 50


def test_a_damaged_file_is_found_out(tmp_path: Path) -> None:
    old = {"w": torch.arange(100.0)}
    path = delta(tmp_path, old, {"w": torch.arange(100.0) + 1})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match="checksum is wrong"):
        read_delta(path)
    path.write_bytes(data[:30])
    with pytest.raises(ModelError):
        read_delta(path)
    path.write_bytes(b"something else")
    with pytest.raises(ModelError, match="not a delta"):
        read_delta(path)


def test_other_weights_than_the_base_lead_nowhere(tmp_path: Path) -> None:
    old = {"w": torch.arange(100.0)}
    found = read_delta(delta(tmp_path, old, {"w": torch.arange(100.0) + 1}))
    with pytest.raises(ModelError, match="does not lead"):
        apply_delta(found, {"w": torch.zeros(100)})
    with pytest.raises(ModelError, match="cannot be applied"):
        apply_delta(found, {"w": torch.zeros(99)})
    with pytest.raises(ModelError, match="cannot be applied"):
        apply_delta(found, {})


def test_weights_of_another_shape_are_no_versions_of_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="differ in names"):
        delta(tmp_path, {"w": torch.zeros(3)}, {"w": torch.zeros(4)})
