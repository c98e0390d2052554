"""Memory lent by handle: what borrowers see, what they are refused, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from rollmill.exchange.handles import (
    Handle,
    LentMemory,
    MemoryHandle,
    borrow,
    read_handle,
)
from rollmill.exchange.machine import is_own_address, machine_name

LENDER = """
import sys
import msgspec, torch
from rollmill.exchange.handles import LentMemory
memory = LentMemory(1 << 20)
memory.tensor.copy_((torch.arange(1 << 20) % 251).to(torch.uint8))
print(msgspec.json.encode(memory.handle(1 << 20)).decode(), flush=True)
sys.stdin.read()
"""
SHORT = """
import os, resource
from rollmill.errors import TrainerError
from rollmill.exchange.handles import LentMemory
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # holds for memory like for files
before = len(os.listdir("/proc/self/fd"))
try:
    LentMemory(8192)
except TrainerError as error:
    print(error, before, len(os.listdir("/proc/self/fd")), sep="|")
"""
EXPECTED = (torch.arange(1 << 20) % 251).to(torch.uint8)


@pytest.fixture
def lender() -> Iterator[tuple[subprocess.Popen[str], Handle]]:
    """Another process that lends 1 MB."""
    process = subprocess.Popen(
        [sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, read_handle(msgspec.json.decode(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_borrower_sees_every_byte_and_can_change_none(
    lender: tuple[subprocess.Popen[str], Handle],
) -> None:
    _, handle = lender
    borrowed = borrow(handle)
    assert torch.equal(borrowed, EXPECTED)
    borrowed.zero_()
    assert torch.equal(borrow(handle), EXPECTED)


def test_a_killed_lender_leaves_nothing_behind(
    lender: tuple[subprocess.Popen[str], Handle],
) -> None:
    process, handle = lender
    files = set(os.listdir("/dev/shm"))
    borrowed = borrow(handle)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert torch.equal(borrowed, EXPECTED)  # until its borrower lets go
    assert "memfd:rollmill-weights" in maps(os.getpid())
    del borrowed
    assert "memfd:rollmill-weights" not in maps(os.getpid())
    assert set(os.listdir("/dev/shm")) <= files
    with pytest.raises(ValueError, match="not lent any more"):
        borrow(handle)


def test_what_is_closed_is_not_lent_any_more() -> None:
    memory = LentMemory(4096)
    handle = memory.handle(4096)
    assert borrow(handle).numel() == 4096
    memory.close()
    assert "memfd:rollmill-weights" not in maps(os.getpid())
    with pytest.raises(ValueError, match="not lent"):
        borrow(handle)


def test_a_handle_of_anything_else_is_refused() -> None:
    memory = LentMemory(4096)
    good = memory.handle(4096)
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(4096))
            with pytest.raises(ValueError, match="is not lent memory"):
                borrow(msgspec.structs.replace(good, fd=file.fileno()))
        unsealed = os.memfd_create("rollmill-weights", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, 4096)
        with pytest.raises(ValueError, match="may change"):
            borrow(msgspec.structs.replace(good, fd=unsealed))
        os.close(unsealed)
        for num_bytes in (0, -1, 4097):
            with pytest.raises(ValueError, match="does not have"):
                borrow(msgspec.structs.replace(good, num_bytes=num_bytes))
        with pytest.raises(ValueError, match="not on one machine"):
            borrow(msgspec.structs.replace(good, machine="another/pid:[1]"))
    finally:
        memory.close()
    for value in ({}, {"kind": "file"}, {"kind": "memory", "pid": "x"}):
        with pytest.raises(ValueError, match=r"Expected|required|Invalid"):
            read_handle(value)


def test_memory_that_is_not_there_is_told_with_a_fix() -> None:
    out = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, check=True)
    told, descriptors_before, descriptors_after = out.stdout.rsplit("|", 2)
    assert "there is no memory to lend weights in" in told
    assert "weights.bucket_mb" in told
    assert int(descriptors_after) == int(descriptors_before)


def test_this_machine_knows_itself() -> None:
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            "from rollmill.exchange.machine import machine_name; print(machine_name())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == machine_name()
    assert is_own_address("127.0.0.1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.1")  # RFC 5737: nobody's
    assert not is_own_address("")


def test_handles_survive_the_wire() -> None:
    handle = MemoryHandle("m", 1, 2, 3)
    assert read_handle(msgspec.to_builtins(handle)) == handle
