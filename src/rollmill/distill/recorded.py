"""Recorded answers as a data source: finished groups, for training without engine and teacher.

Samples are made when they are asked for; each epoch is a permutation of all groups.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.data.order import RowOrder
from rollmill.distill.recording import Place, Recording
from rollmill.errors import CheckpointError
from rollmill.sample import Group, Sample
from rollmill.sample_codec import decode_group, encode_group

STATE_FORMAT = 2


class RecordedSource:
    """Finished groups from a recording, for ever; a `DataSource` for replay.

    Args:
        recording: the checked answers.
        seed: of the permutations.
        shuffle: a new permutation every epoch; otherwise groups come in their own order.
    """

    def __init__(self, recording: Recording, *, seed: int, shuffle: bool = True) -> None:
        self.recording = recording
        self._order = RowOrder([len(recording.groups)], [1.0], shuffle=shuffle, seed=seed)
        self._waiting: dict[int, Group] = {}
        self._next_group = 0
        self._next_sample = 0

    def __len__(self) -> int:
        """Groups in the recording."""
        return len(self.recording.groups)

    def take(self, n: int) -> list[Group]:
        """Exactly n groups: those given back first, then the next ones, epoch after epoch."""
        if n < 0:
            raise ValueError(f"cannot take {n} groups")
        groups = [self._waiting.pop(index) for index in sorted(self._waiting)[:n]]
        while len(groups) < n:
            groups.append(self._next())
        return groups

    def give_back(self, groups: Sequence[Group]) -> None:
        """Return groups that were not used.

        Raises:
            ValueError: a group is waiting already or was never given out; none is taken back.
        """
        returned = {group.group_index: group for group in groups}
        known = all(0 <= i < self._next_group and i not in self._waiting for i in returned)
        if not known or len(returned) != len(groups):
            raise ValueError(f"expected groups that were taken, each once, found {list(returned)}")
        self._waiting.update(returned)

    def new_index(self) -> int:
        """A sample index that was never used."""
        self._next_sample += 1
        return self._next_sample - 1

    def draw(self, count: int, seed: int) -> list[Place]:
        """`count` different rows at random, or all; the same for a seed."""
        places = self.recording.places
        chosen = np.random.default_rng(seed).permutation(len(places))[:count]
        return [places[number] for number in sorted(chosen.tolist())]

    def state_dict(self) -> dict[str, Any]:
        """The position and the groups given back, as JSON values."""
        return {
            "format": STATE_FORMAT,
            "data": self.recording.fingerprint,
            "order": self._order.state_dict(),
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "waiting": [
                base64.b64encode(encode_group(self._waiting[index])).decode("ascii")
                for index in sorted(self._waiting)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: it is a position in other recorded answers.
        """
        fingerprint = self.recording.fingerprint
        if state.get("format") != STATE_FORMAT or state.get("data") != fingerprint:
            raise CheckpointError(
                "the saved position is not one in these recorded answers",
                where="opd.data",
                expected=f"format {STATE_FORMAT}, files with the hash {state.get('data')}",
                found=f"format {state.get('format')}, files with the hash {fingerprint}",
                fix="resume with the folder that the run began with",
            )
        self._order.load_state_dict(state["order"])
        groups = [decode_group(base64.b64decode(text)) for text in state["waiting"]]
        self._waiting = {group.group_index: group for group in groups}
        self._next_group = int(state["next_group"])
        self._next_sample = int(state["next_sample"])

    def _next(self) -> Group:
        _, number = self._order.next()
        samples: list[Sample] = []
        for attempt, place in enumerate(self.recording.groups[number]):
            row = place.read()
            index = self.new_index()
            samples.append(
                row.to_sample(index=index, group_index=self._next_group, attempt=attempt)
            )
        self._next_group += 1
        return Group(self._next_group - 1, samples)
