"""Weight updates by handle: the trainer lends its memory on this machine, the engine copies it.

SGLang takes pickles here. This engine reads none: it takes the same buckets in plain terms, as an
extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from aiohttp import web

from rollmill.engine.embedded.replies import field_of, read_body
from rollmill.engine.embedded.sampling import BodyError, RequestError
from rollmill.engine.embedded.sessions import read_specs, take_in
from rollmill.engine.embedded.state import STATE
from rollmill.exchange.buckets import unflatten
from rollmill.exchange.checksum import checksum_of
from rollmill.exchange.handles import Handle, borrow, read_handle
from rollmill.exchange.specs import WeightSpec


async def update_weights_from_tensor(request: web.Request) -> web.Response:
    """POST /update_weights_from_tensor {names, dtypes, shapes, handle, checksums?, weight_version}:
    copies one bucket into the open session.

    The weights lie one after the other in the memory behind `handle` (`exchange.handles`).
    `checksums` has one of each (`exchange.checksum`); they are compared in CPU memory only, since
    that of a GPU would have to be brought there.
    """
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    if "serialized_named_tensors" in body:
        raise RequestError(
            "the embedded engine reads no pickles: it takes names, dtypes, shapes and handle"
        )
    specs = read_specs(body)
    try:
        handle = read_handle(field_of(body, "handle", dict, {}))
    except ValueError as error:
        raise BodyError(f"handle: {error}") from error
    checksums = field_of(body, "checksums", list, None)
    if checksums is not None and len(checksums) != len(specs):
        raise RequestError("checksums must be as many as names")
    device = state.engine.runner.device
    return await take_in(
        state, body, "update_weights_from_tensor", lambda: _copied(specs, handle, checksums, device)
    )


def _copied(
    specs: Sequence[WeightSpec],
    handle: Handle,
    checksums: Sequence[Any] | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Copies of the lent weights: of GPU memory on the engine's device, of CPU memory beside it.

    Raises:
        ValueError: the memory is not there, or not what was told.
    """
    flat = borrow(handle)
    lent = unflatten(specs, flat)
    if flat.is_cuda:
        copies = {name: tensor.to(device, copy=True) for name, tensor in lent.items()}
        torch.cuda.synchronize()  # the trainer fills its memory anew when it is told
        return copies
    copies = {name: tensor.clone() for name, tensor in lent.items()}
    if checksums is not None:
        _check(copies, checksums)
    return copies


def _check(copies: Mapping[str, torch.Tensor], checksums: Sequence[Any]) -> None:
    for (name, tensor), expected in zip(copies.items(), checksums, strict=True):
        found = checksum_of(tensor)
        if found != expected:
            raise ValueError(f"{name} has the checksum {found}, not the trainer's {expected}")
