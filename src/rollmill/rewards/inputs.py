"""What a reward sees: a small frozen value, not the training sample.

Graders run in other processes. They get the texts and the label and nothing they could change by
accident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmill.sample import Reward, Sample


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One answer to judge.

    Attributes:
        prompt: the prompt as the data had it: text or chat messages.
        response: the answer as text.
        label: the reference answer, any JSON value.
        metadata: JSON object of the data row.
        status: how generation ended (`completed` or `truncated`, as a rule).
        response_length: tokens of the answer; 0 when graded from a file.
        index: unique number of the sample in its run; seeds the `random` reward.
    """

    prompt: str | list[dict[str, Any]] = ""
    response: str = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    status: str = "completed"
    response_length: int = 0
    index: int = 0

    @classmethod
    def from_sample(cls, sample: Sample) -> RewardInput:
        """The judge's view of a sample."""
        return cls(
            prompt=sample.prompt,
            response=sample.response,
            label=sample.label,
            metadata=sample.metadata,
            status=sample.status.value,
            response_length=sample.response_length,
            index=sample.index,
        )


def checked_reward(value: Any) -> Reward | None:
    """The return value of a reward function as numbers; None (invalid) passes.

    Raises:
        ValueError: neither a finite number, nor a mapping from names to finite numbers, nor None.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("expected at least one part in the reward mapping, found none")
        return {str(name): _finite(part, f"part {name!r}") for name, part in value.items()}
    return _finite(value, "the reward")


def _finite(value: Any, what: str) -> float:
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"expected {what} to be a number, found {type(value).__name__}: {error}"
        ) from error
    if not math.isfinite(number):
        raise ValueError(f"expected {what} to be a finite number, found {value!r}")
    return number
