"""The currency of rollmill: a prompt, the segments written after it, and what became of them.

A `Sample` stores its prompt and a list of `Segment`s. Everything that has one entry per
response token (loss mask, log-probs, weight versions) is *derived* from the segments by
concatenation, so the lengths cannot disagree. A `Group` holds all samples that answer one
prompt; samples of one attempt (fan-out siblings) are counted once by `Group.attempts`.

Arrays are numpy, read-only, `int32` for token ids and `float32` for log-probs (natural log).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Source = Literal["engine", "environment", "data"]
Reward = float | dict[str, float]

NO_VERSION = -1
"""Entry of `Sample.weight_versions` for tokens that no engine wrote."""


class Status(StrEnum):
    """Where a sample is in its life. Only PENDING and ABORTED are generated (again)."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_finished(self) -> bool:
        """True when the answer will not change any more (stopped, cut by length, or failed)."""
        return self not in (Status.PENDING, Status.ABORTED)


def int_array(values: npt.ArrayLike) -> IntArray:
    """`values` as a read-only contiguous int32 vector.

    Raises:
        ValueError: they are no vector, or not all of them fit.
    """
    return _vector(values, np.dtype(np.int32))


def float_array(values: npt.ArrayLike) -> FloatArray:
    """`values` as a read-only contiguous float32 vector."""
    return _vector(values, np.dtype(np.float32))


def _vector(values: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    raw = np.asarray(values)
    if raw.size == 0:
        raw = raw.reshape(0).astype(dtype)
    if raw.ndim != 1:
        raise ValueError(f"expected a vector, found an array of shape {raw.shape}")
    if raw.dtype == dtype and raw.flags.c_contiguous and not raw.flags.writeable:
        return raw
    converted = np.array(raw, dtype=dtype)
    if dtype.kind == "i" and not np.array_equal(converted, raw):
        raise ValueError("expected token ids that fit in int32, found other values")
    converted.flags.writeable = False
    return converted


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One contiguous run of response tokens with one origin.

    Attributes:
        token_ids: int32 [T].
        log_probs: float32 [T], log-prob of each token under the policy that sampled it, at the
            sampling temperature; None when unknown. Trainable tokens need them, unless they come
            from the data: nobody may have sampled those.
        trainable: whether these tokens enter the loss.
        weight_version: version of the weights that wrote the tokens; None when no engine of
            the run did.
        source: `engine` (the policy wrote it), `environment` (a tool or user wrote it) or `data`
            (an answer recorded in the data).
    """

    token_ids: IntArray
    log_probs: FloatArray | None
    trainable: bool
    weight_version: int | None
    source: Source

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", int_array(self.token_ids))
        if self.log_probs is not None:
            object.__setattr__(self, "log_probs", float_array(self.log_probs))
            if len(self.log_probs) != len(self.token_ids):
                raise ValueError(
                    f"segment: expected one log-prob per token, found {len(self.log_probs)} "
                    f"log-probs for {len(self.token_ids)} tokens"
                )
        elif self.trainable and self.source != "data":
            raise ValueError("segment: a trainable segment needs the log-probs of its tokens")
        if self.source not in get_args(Source):
            raise ValueError(
                f"segment: expected engine, environment or data, found {self.source!r}"
            )

    @classmethod
    def from_engine(
        cls, token_ids: npt.ArrayLike, log_probs: npt.ArrayLike, weight_version: int
    ) -> Segment:
        """Tokens that the policy sampled: trainable, with the version that wrote them."""
        return cls(int_array(token_ids), float_array(log_probs), True, weight_version, "engine")

    @classmethod
    def from_environment(cls, token_ids: npt.ArrayLike) -> Segment:
        """Tokens that a tool or a user wrote: in the context, never in the loss."""
        return cls(int_array(token_ids), None, False, None, "environment")

    @classmethod
    def from_data(cls, token_ids: npt.ArrayLike, log_probs: npt.ArrayLike | None = None) -> Segment:
        """Tokens of a recorded answer: trainable, with log-probs when somebody noted them."""
        known = None if log_probs is None else float_array(log_probs)
        return cls(int_array(token_ids), known, True, None, "data")

    def untrainable(self) -> Segment:
        """The same tokens, taken out of the loss (off-policy masking)."""
        return Segment(self.token_ids, self.log_probs, False, self.weight_version, self.source)

    def first(self, length: int) -> Segment:
        """The first `length` of these tokens, or all when there are no more."""
        if length >= len(self):
            return self
        log_probs = None if self.log_probs is None else self.log_probs[:length]
        return Segment(
            self.token_ids[:length], log_probs, self.trainable, self.weight_version, self.source
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and _fields_equal(self, other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class EngineCounters:
    """What the engine reported about serving a sample, summed over its calls."""

    num_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sample:
    """One answer to one prompt (or, with fan-out, one training sample of an answer).

    Attributes:
        prompt_tokens: int32 [P]; samples of a group share one array.
        index: unique over the run, monotonic, never used again in a later epoch.
        group_index: which prompt this answers; shared by the group.
        attempt: 0..n-1, which answer to that prompt; fan-out siblings share it.
        prompt: the prompt as the data had it: text or chat messages.
        label: the reference answer, any JSON value.
        metadata: JSON object from the data row and from user functions.
        segments: what followed the prompt.
        response: the answer as text, for rewards and people; never tokenized again.
        failure: the reason, when status is FAILED.
        reward: a number or named parts; None until judged.
        reward_outcome: `value`, `invalid`, `timeout` or `error`; None until judged.
        reward_detail: what the grader extracted or complained about, for people.
        in_loss: False takes the whole sample out of the loss (sample filter).
        generate_function: dotted path that overrides the run's generate hook.
        reward_function: dotted path or type that overrides the run's reward.
        session_id: requests with one id go to one engine while it is not overloaded.
        teacher_log_probs: float32, one per response token.
        routed_experts: int32 [tokens - 1, layers, top_k].
    """

    prompt_tokens: IntArray
    index: int = 0
    group_index: int = 0
    attempt: int = 0
    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    response: str = ""
    status: Status = Status.PENDING
    failure: str | None = None
    reward: Reward | None = None
    reward_outcome: str | None = None
    reward_detail: str | None = None
    in_loss: bool = True
    generate_function: str | None = None
    reward_function: str | None = None
    session_id: str | None = None
    timing: dict[str, float] = field(default_factory=dict)
    counters: EngineCounters = field(default_factory=EngineCounters)
    teacher_log_probs: FloatArray | None = None
    multimodal_inputs: dict[str, Any] | None = None
    routed_experts: IntArray | None = None

    def __post_init__(self) -> None:
        self.prompt_tokens = int_array(self.prompt_tokens)

    @property
    def tokens(self) -> IntArray:
        """int32 [P + R]: prompt, then response."""
        return _concatenate([self.prompt_tokens, *(s.token_ids for s in self.segments)], np.int32)

    @property
    def response_tokens(self) -> IntArray:
        """int32 [R]."""
        return _concatenate([s.token_ids for s in self.segments], np.int32)

    @property
    def response_length(self) -> int:
        """R, the number of response tokens, whatever the mask."""
        return sum(len(s) for s in self.segments)

    @property
    def loss_mask(self) -> BoolArray:
        """bool [R]: True where the token enters the loss."""
        parts = [np.full(len(s), s.trainable and self.in_loss) for s in self.segments]
        return _concatenate(parts, np.bool_)

    @property
    def rollout_log_probs(self) -> FloatArray:
        """float32 [R]: log-prob when sampled; 0 where unknown (see `Segment.log_probs`)."""
        parts = [
            np.zeros(len(s), np.float32) if s.log_probs is None else s.log_probs
            for s in self.segments
        ]
        return _concatenate(parts, np.float32)

    @property
    def weight_versions(self) -> IntArray:
        """int32 [R]: version that wrote each token, `NO_VERSION` where no engine did."""
        parts = [
            np.full(len(s), NO_VERSION if s.weight_version is None else s.weight_version, np.int32)
            for s in self.segments
        ]
        return _concatenate(parts, np.int32)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among trainable tokens; None when there is none."""
        versions = [
            s.weight_version
            for s in self.segments
            if s.trainable and len(s) and s.weight_version is not None
        ]
        return min(versions, default=None)

    def scalar_reward(self, key: str | None = None) -> float:
        """The reward as one number; `key` picks a part when the reward is a dict.

        Raises:
            ValueError: not judged yet, or the key is missing or unnecessary.
        """
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward yet")
        if not isinstance(self.reward, Mapping):
            return float(self.reward)
        if key is None or key not in self.reward:
            raise ValueError(
                f"sample {self.index}: the reward has parts {sorted(self.reward)}; "
                f"reward key {key!r} does not name one of them"
            )
        return float(self.reward[key])

    def fail(self, reason: str) -> None:
        """Record a failure: data, not a crash."""
        self.status = Status.FAILED
        self.failure = reason

    def restart(self) -> None:
        """Back to a fresh prompt: nothing generated, judged or taken out of the loss."""
        self.segments = []
        self.response = ""
        self.status = Status.PENDING
        self.failure = None
        self.reward = None
        self.reward_outcome = None
        self.reward_detail = None
        self.in_loss = True
        self.timing = {}
        self.counters = EngineCounters()
        self.teacher_log_probs = None
        self.routed_experts = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and _fields_equal(self, other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class Group:
    """All samples that answer one prompt, fan-out siblings included."""

    group_index: int
    samples: list[Sample]

    def attempts(self) -> list[list[Sample]]:
        """Samples by attempt, ascending; siblings of one attempt together.

        Whatever counts answers (group statistics, loss averaging, step splitting) counts the
        entries of this list.
        """
        by_attempt: dict[int, list[Sample]] = {}
        for sample in self.samples:
            by_attempt.setdefault(sample.attempt, []).append(sample)
        return [by_attempt[attempt] for attempt in sorted(by_attempt)]

    @property
    def is_finished(self) -> bool:
        """True when no sample needs (more) generation."""
        return all(sample.status.is_finished for sample in self.samples)

    @property
    def has_failed(self) -> bool:
        """True when any sample is FAILED."""
        return any(sample.status is Status.FAILED for sample in self.samples)

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(sample.response_length for sample in self.samples)


def attempt_rewards(group: Group, key: str | None = None) -> list[float]:
    """One reward per attempt: the mean over its fan-out siblings (equal, as a rule).

    Raises:
        ValueError: when a sample has no usable reward.
    """
    rewards = [[sample.scalar_reward(key) for sample in each] for each in group.attempts()]
    return [each[0] if len(each) == 1 else float(np.mean(each)) for each in rewards]


def flatten(groups: Iterable[Group]) -> list[Sample]:
    """All samples of all groups, in order."""
    return [sample for group in groups for sample in group.samples]


def _concatenate(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _fields_equal(a: Any, b: Any) -> bool:
    return all(_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)
