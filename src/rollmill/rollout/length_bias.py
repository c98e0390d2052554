"""Whether short answers crowd out long ones: what is trained against what was issued.

Short answers finish first, so a batch that takes what is there holds more of them than the prompts
would give. The fair picture is the groups in the order in which they were issued, up to the first
that has not ended yet: whoever is in there did not get in for being short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rollmill.sample import Group


class LengthBias:
    """Mean length of the answers trained on, divided by that of the answers issued, so far.

    1 is no bias; 0.9 says that trained answers are a tenth shorter than those asked for.
    """

    def __init__(self) -> None:
        self._in_order: deque[int] = deque()
        self._ended: dict[int, tuple[int, int]] = {}
        self._issued = _Mean()
        self._trained = _Mean()

    @property
    def value(self) -> float:
        """The ratio; 1 while either side has no tokens."""
        trained, issued = self._trained.value, self._issued.value
        return trained / issued if trained and issued else 1.0

    def issued(self, group_index: int) -> None:
        """A group was asked for."""
        self._in_order.append(group_index)

    def ended(self, group: Group) -> None:
        """An issued group is finished, rejected or failed; its lengths are known."""
        self._ended[group.group_index] = _total([group])
        while self._in_order and (total := self._ended.pop(self._in_order[0], None)) is not None:
            self._in_order.popleft()
            self._issued.add(*total)

    def trained(self, groups: Iterable[Group]) -> None:
        """These groups make a batch."""
        self._trained.add(*_total(groups))


class _Mean:
    def __init__(self) -> None:
        self._num_tokens = self._num_answers = 0

    @property
    def value(self) -> float:
        return self._num_tokens / max(1, self._num_answers)

    def add(self, num_tokens: int, num_answers: int) -> None:
        self._num_tokens += num_tokens
        self._num_answers += num_answers


def _total(groups: Iterable[Group]) -> tuple[int, int]:
    """Response tokens and answers; fan-out siblings are one answer."""
    num_tokens = num_answers = 0
    for group in groups:
        num_tokens += sum(sample.response_length for sample in group.samples)
        num_answers += len(group.attempts())
    return num_tokens, num_answers
