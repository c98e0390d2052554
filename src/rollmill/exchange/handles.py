"""Memory that one process lends to others on its machine by a handle: nothing is sent but where
it is.

CPU memory is a memfd, which has no name anywhere: the kernel frees it when the last process that
uses it is gone, however that ended, so nothing can be left behind. The handle says which
descriptor of which process it is. GPU memory is lent by CUDA's own handles, which torch counts.
Invariant: a borrower can change nothing of what it borrows on the CPU, and finds out when a handle
is not one of these.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import msgspec
import torch

from rollmill.errors import TrainerError
from rollmill.exchange.machine import machine_name

NAME = "rollmill-weights"
"""What the kernel calls the memory in /proc."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Its size is fixed: reading it can never fault."""


class MemoryHandle(msgspec.Struct, frozen=True, tag_field="kind", tag="memory"):
    """CPU memory: a descriptor `fd` of process `pid`, from its start on."""

    machine: str
    pid: int
    fd: int
    num_bytes: int


class CudaHandle(msgspec.Struct, frozen=True, tag_field="kind", tag="cuda"):
    """GPU memory, in the terms of torch's `_share_cuda_`; good for one borrower."""

    machine: str
    gpu: str
    memory: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    has_event: bool


Handle = MemoryHandle | CudaHandle


def read_handle(value: object) -> Handle:
    """A handle from its plain form (`msgspec.to_builtins`).

    Raises:
        ValueError: it is none.
    """
    handle: Handle = msgspec.convert(value, Handle)
    return handle


class LentMemory:
    """CPU memory of this process that others can borrow.

    Args:
        num_bytes: its size; all of it is taken at once.

    Raises:
        TrainerError: there is no room.

    Attributes:
        tensor: uint8, one dimension, all of it.
    """

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)  # else a full machine is a signal, later
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self.tensor = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)
        except OSError as error:
            os.close(self._fd)
            raise TrainerError(
                "there is no memory to lend weights in",
                expected=f"{num_bytes} bytes",
                found=str(error),
                fix="set weights.bucket_mb to less, or weights.transport to distributed",
            ) from error

    def handle(self, num_bytes: int) -> MemoryHandle:
        """How others find the first so many bytes, while this process lives and has not closed."""
        return MemoryHandle(machine_name(), os.getpid(), self._fd, num_bytes)

    def close(self) -> None:
        """Lend it no more; it is freed when its borrowers are done. Call it once."""
        del self.tensor
        os.close(self._fd)


def lend_cuda(flat: torch.Tensor) -> CudaHandle:
    """A handle of a tensor that fills its GPU memory; its memory has to stay until it was read."""
    memory = flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    gpu = str(torch.cuda.get_device_properties(flat.device).uuid)
    _, *terms = memory  # the first is this process's own number of the GPU
    return CudaHandle(machine_name(), gpu, *terms)


def borrow(handle: Handle) -> torch.Tensor:
    """The memory behind a handle: uint8, one dimension. Copy what is to stay.

    Raises:
        ValueError: there is no such memory here: another machine or container, a process that is
            gone, a GPU that this process does not see.
        OSError: this user may not read it.
    """
    if handle.machine != machine_name():
        raise ValueError(
            "the trainer and this engine are not on one machine (or in one container): weights "
            f"cannot be handed over by handle. Trainer: {handle.machine}, engine: {machine_name()}"
        )
    if isinstance(handle, MemoryHandle):
        return _map(handle)
    return _open_cuda(handle)


def _map(handle: MemoryHandle) -> torch.Tensor:
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            raise ValueError(f"{path} is not lent memory")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ValueError(f"the memory is not lent any more: {error}") from error
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"the size of {path} may change")
        if not 0 < handle.num_bytes <= os.fstat(fd).st_size:
            raise ValueError(f"{path} does not have {handle.num_bytes} bytes")
        mapped = mmap.mmap(fd, handle.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _open_cuda(handle: CudaHandle) -> torch.Tensor:
    index = _gpu_index(handle.gpu)
    storage = torch.UntypedStorage._new_shared_cuda(
        index,
        handle.memory,
        handle.num_bytes,
        handle.offset,
        handle.counter,
        handle.counter_offset,
        handle.event,
        handle.has_event,
    )
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)


def _gpu_index(uuid: str) -> int:
    """This process's number of a GPU.

    Raises:
        ValueError: it does not see that GPU.
    """
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(
        f"this engine does not see the trainer's GPU {uuid}; start it with that GPU in "
        "CUDA_VISIBLE_DEVICES, or set weights.transport to distributed"
    )
