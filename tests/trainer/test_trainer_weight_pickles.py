"""What is written for SGLang: read in a process that shares nothing with the writer."""

from __future__ import annotations

import base64
import os
import pickletools
import subprocess
import sys

import torch

from rollmill.exchange.buckets import flatten, specs_of
from rollmill.exchange.checksum import checksums_of
from rollmill.trainer.weight_pickles import pickle_bucket

ALLOWED = {
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "uint8"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("types", "SimpleNamespace"),
}
"""Of what SGLang 0.5.23 lets a pickle name (`SafeUnpickler.ALLOWED_GLOBALS`), what ours may."""

READER = """
import base64, pickle, sys, zlib
import torch
data = pickle.loads(base64.b64decode(sys.stdin.read()))
for meta in data["metadata"]:
    flat = data["flattened_tensor"][meta.start_idx : meta.end_idx]
    tensor = flat.view(meta.dtype).reshape(meta.shape)
    assert meta.numel == meta.end_idx - meta.start_idx == flat.numel()
    print(meta.name, f"{zlib.crc32(tensor.view(torch.uint8).numpy().tobytes()):08x}")
del data, flat, tensor  # as SGLang does when it has loaded them
"""


def test_every_weight_of_a_bucket_can_be_read_and_nothing_is_left() -> None:
    files = set(os.listdir("/dev/shm"))
    weights = {"a": torch.randn(33, 7), "b": torch.randn(5), "c": torch.randn(2, 3, 4)}
    bucket = specs_of(weights)
    flat = flatten(bucket, weights)
    for _ in range(2):  # once for each rank
        pickled = pickle_bucket(bucket, flat)
        out = subprocess.run(
            [sys.executable, "-c", READER],
            input=pickled,
            capture_output=True,
            text=True,
            check=True,
        )
        found = dict(line.split() for line in out.stdout.splitlines())
        assert found == checksums_of(weights)
    del flat
    ours = {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}
    assert ours <= files


def test_a_pickle_names_only_what_sglang_allows() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weights = {"a": torch.zeros(3, dtype=dtype)}
        bucket = specs_of(weights)
        pickled = base64.b64decode(pickle_bucket(bucket, flatten(bucket, weights)))
        assert globals_of(pickled) <= ALLOWED


def globals_of(pickled: bytes) -> set[tuple[str, str]]:
    """The classes and functions that a pickle names."""
    found, texts, memo = set(), [], []
    for code, argument, _ in pickletools.genops(pickled):
        if code.name == "GLOBAL":
            module, name = argument.split(" ")
            found.add((module, name))
        elif code.name == "STACK_GLOBAL":
            found.add((texts[-2], texts[-1]))
        elif code.name == "MEMOIZE":
            memo.append(texts[-1] if texts else "")
        elif code.name in ("BINGET", "LONG_BINGET"):
            texts.append(memo[argument])
        elif isinstance(argument, str):
            texts.append(argument)
    return found


def test_the_sharing_strategy_of_the_process_stays() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    weights = {"a": torch.zeros(3)}
    pickle_bucket(specs_of(weights), flatten(specs_of(weights), weights))
    assert torch.multiprocessing.get_sharing_strategy() == before
