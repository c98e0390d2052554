"""What every HTTP handler of one server shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web

from rollmill.engine.embedded.broker import Broker
from rollmill.engine.embedded.engine import EmbeddedEngine
from rollmill.engine.embedded.groups import UpdateGroups, UpdateSession
from rollmill.engine.embedded.requests import ModelFacts
from rollmill.engine.embedded.responses import TextReader
from rollmill.engine.embedded.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PreparedDelta:
    """New weights that wait beside the old ones.

    Attributes:
        number: which one it is; its caller names it.
        num_updates: updates that the engine had had: after another one it is worthless.
        changed: the weights that change.
    """

    number: int
    num_updates: int
    changed: dict[str, torch.Tensor]


@dataclass(slots=True)
class ServerState:
    """One engine behind one HTTP server."""

    engine: EmbeddedEngine
    broker: Broker
    facts: ModelFacts
    reader: TextReader
    tokenizer: Any | None
    model_path: str
    tokenizer_path: str
    served_model_name: str
    settings: dict[str, Any]
    """The engine's settings, as `/server_info` shows them."""
    groups: UpdateGroups
    prepared: PreparedDelta | None = None
    num_prepared: int = 0
    session: UpdateSession | None = None
    """The open weight-update session."""
    started_at: float = field(default_factory=time.time)
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    group_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a process group is joined or left, which may take long."""
    in_flight: dict[str, Sequence] = field(default_factory=dict)
    """Requests by id."""

    def claim(self, sequences: Seq[Sequence]) -> str | None:
        """Note sequences as in flight; None, or the first id that already is (then none is)."""
        for sequence in sequences:
            if sequence.rid in self.in_flight:
                return sequence.rid
        self.in_flight.update({s.rid: s for s in sequences})
        return None

    def release(self, sequences: Seq[Sequence]) -> None:
        """Undo `claim`."""
        for sequence in sequences:
            if self.in_flight.get(sequence.rid) is sequence:
                del self.in_flight[sequence.rid]


STATE = web.AppKey("rollmill_embedded_state", ServerState)
