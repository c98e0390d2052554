"""Handing out prompts in groups, for as long as anyone asks.

`PromptSource` gives every prompt a group number and every sample an index that are never used
again, whatever the epoch; unfinished groups that come back are given out before new ones, oldest
first. The books: every group taken is with the caller until it is given back.

Invariant: `take(n)` gives exactly n groups, and `state_dict` holds all it takes to go on as if
nothing had happened (the data files apart).
"""

from __future__ import annotations

import base64
import copy
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rollmill.data.loading import Dataset
from rollmill.data.order import RowOrder
from rollmill.data.prompts import PromptRow
from rollmill.errors import CheckpointError, HookError
from rollmill.sample import Group, Sample
from rollmill.sample_codec import decode_group, encode_group

logger = logging.getLogger(__name__)

STATE_FORMAT = 1

BufferPolicy = Callable[[list[Group], int], Sequence[Group]]
"""`policy(waiting, n)` chooses which unfinished groups come back now, in which order.

It gets all of them, oldest first, and returns at most n of those very objects; the others wait.
"""


class DataSource(Protocol):
    """Where groups to answer come from; replaceable by a function of yours."""

    def take(self, n: int) -> list[Group]:
        """Exactly n groups: unfinished ones first, then fresh ones."""

    def give_back(self, groups: Sequence[Group]) -> None:
        """Return unfinished groups; all of them or, on an error, none."""

    def new_index(self) -> int:
        """A sample index that was never used, for fan-out siblings."""

    def state_dict(self) -> dict[str, Any]:
        """The position as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave."""

    def __len__(self) -> int:
        """Prompts in the data set."""


def oldest_first(waiting: list[Group], n: int) -> list[Group]:
    """The default buffer policy."""
    return waiting[:n]


class PromptSource:
    """Groups from the rows of a data set; a `DataSource`.

    Args:
        dataset: the rows.
        n_samples_per_prompt: samples per group.
        seed: of the shuffle.
        shuffle: a new permutation of the original order every epoch.
        buffer_policy: which unfinished groups come back first.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        n_samples_per_prompt: int,
        seed: int = 0,
        shuffle: bool = True,
        buffer_policy: BufferPolicy = oldest_first,
    ) -> None:
        self.dataset = dataset
        self._num_samples = n_samples_per_prompt
        self._order = RowOrder(
            [len(part.rows) for part in dataset.parts],
            [part.weight for part in dataset.parts],
            shuffle=shuffle,
            seed=seed,
        )
        self._fingerprints = [_fingerprint(part.rows) for part in dataset.parts]
        self._policy = buffer_policy
        self._waiting: dict[int, Group] = {}
        self._next_group = 0
        self._next_sample = 0

    def __len__(self) -> int:
        """Prompts in the data set, whatever the mixing weights."""
        return sum(len(part.rows) for part in self.dataset.parts)

    @property
    def num_waiting(self) -> int:
        """Unfinished groups that were given back and not yet taken again."""
        return len(self._waiting)

    def take(self, n: int) -> list[Group]:
        """Exactly n groups: unfinished ones first, then fresh ones, wrapping epochs as needed.

        Raises:
            HookError: the buffer policy chose groups that are not waiting, or too many.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} groups")
        groups = self._take_waiting(n)
        while len(groups) < n:
            groups.append(self._fresh_group())
        return groups

    def give_back(self, groups: Sequence[Group]) -> None:
        """Return unfinished groups. They wait, tokens and all, until taken again.

        Raises:
            ValueError: a group is waiting already or was never given out; none is taken back.
        """
        returned = {group.group_index: group for group in groups}
        unknown = [
            index
            for index in returned
            if index in self._waiting or not 0 <= index < self._next_group
        ]
        if unknown or len(returned) != len(groups):
            raise ValueError(
                "expected groups that were taken from this source, each once, found group "
                f"indices {[group.group_index for group in groups]} (not out: {unknown})"
            )
        self._waiting.update(returned)

    def new_index(self) -> int:
        """A sample index that was never used, for fan-out siblings."""
        self._next_sample += 1
        return self._next_sample - 1

    def _take_waiting(self, n: int) -> list[Group]:
        if not self._waiting or n == 0:
            return []
        waiting = [self._waiting[index] for index in sorted(self._waiting)]
        try:
            chosen = list(self._policy(waiting, n))
        except Exception as error:
            raise HookError(
                "the buffer policy raised, or returned no list",
                where="rollout.hooks.buffer_policy",
                expected=f"at most {n} of the {len(waiting)} groups it was given, each once",
                found=f"{type(error).__name__}: {error}",
                fix="mend the function, or leave it out: oldest first is the default",
            ) from error
        known = {id(group) for group in waiting}
        distinct = {id(group) for group in chosen}
        if len(chosen) > n or len(distinct) != len(chosen) or not distinct <= known:
            raise HookError(
                "the buffer policy returned something else than a choice of its groups",
                where="rollout.hooks.buffer_policy",
                expected=f"at most {n} of the {len(waiting)} groups it was given, each once",
                found=f"{len(chosen)} groups, {len(distinct & known)} of them distinct and waiting",
                fix="return a list of the same Group objects",
            )
        for group in chosen:
            del self._waiting[group.group_index]
        return chosen

    def _fresh_group(self) -> Group:
        part, number = self._order.next()
        row = self.dataset.parts[part].rows[number]
        samples = [self._fresh_sample(row, attempt) for attempt in range(self._num_samples)]
        group = Group(self._next_group, samples)
        self._next_group += 1
        self._next_sample += self._num_samples
        return group

    def _fresh_sample(self, row: PromptRow, attempt: int) -> Sample:
        """A sample that shares the prompt, label and images, and has its own metadata."""
        return Sample(
            prompt_tokens=row.prompt_tokens,
            index=self._next_sample + attempt,
            group_index=self._next_group,
            attempt=attempt,
            prompt=row.prompt,
            label=row.label,
            metadata=copy.deepcopy(row.metadata),
            multimodal_inputs={"images": row.images} if row.images else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position and the waiting groups, as JSON values."""
        return {
            "format": STATE_FORMAT,
            "data": self._fingerprints,
            "order": self._order.state_dict(),
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "waiting": [
                base64.b64encode(encode_group(self._waiting[index])).decode("ascii")
                for index in sorted(self._waiting)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, waiting groups included.

        When the data set has changed since, its new rows begin a new epoch: the saved position
        means nothing in them. That is logged as a warning.

        Raises:
            CheckpointError: `state` is not of this format.
        """
        if state.get("format") != STATE_FORMAT:
            raise CheckpointError(
                "the saved position of the prompt source cannot be read",
                expected=f"format {STATE_FORMAT}",
                found=repr(state.get("format")),
                fix="resume with the version of rollmill that wrote the checkpoint",
            )
        if state["data"] == self._fingerprints:
            self._order.load_state_dict(state["order"])
        else:
            logger.warning("the data set changed since the checkpoint: starting a new epoch of it")
            self._order.start_after(state["order"])
        groups = [decode_group(base64.b64decode(text)) for text in state["waiting"]]
        self._waiting = {group.group_index: group for group in groups}
        self._next_group = int(state["next_group"])
        self._next_sample = int(state["next_sample"])


def _fingerprint(rows: Sequence[PromptRow]) -> str:
    """A hash over the prompt tokens of the rows in order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(len(row.prompt_tokens).to_bytes(8, "little"))
        digest.update(row.prompt_tokens.tobytes())
    return digest.hexdigest()
