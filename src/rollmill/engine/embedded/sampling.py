"""How the tokens of one request are chosen: SGLang's `sampling_params`, checked.

A `SamplingParams` that exists is valid: every rule is enforced in `parse_sampling_params`, so the
sampler and the scheduler never check again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GREEDY_BELOW = 1e-6
"""Temperatures under this mean greedy decoding."""
MAX_STOP_STRINGS = 32
MAX_SAMPLES = 1024

_FIELDS = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)
_UNSUPPORTED = (
    "stop_regex",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "beam_width",
    "watermark",
    "choice",
)


class RequestError(ValueError):
    """A request that is well-formed JSON but asks for something impossible: HTTP 400."""


class UnknownFieldError(RequestError):
    """A key in `sampling_params` that does not exist."""


class BodyError(RequestError):
    """A body that is no JSON object, or a field of the wrong type: HTTP 400, "Bad Request"."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Valid sampling settings of one request.

    Greedy requests carry temperature 1 and `is_greedy`, as SGLang treats them, so that their
    reported log-probs are those of the unscaled softmax.
    """

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    is_greedy: bool = False
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether top-p, top-k or min-p removes tokens before sampling."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits change before the softmax, other than by temperature."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.min_new_tokens
            or self.logit_bias
        )


def parse_sampling_params(raw: object, vocab_size: int) -> SamplingParams:
    """The settings in a request's `sampling_params` object; null fields take their defaults.

    Raises:
        UnknownFieldError: for a key that SGLang does not have.
        BodyError: for a value of the wrong type.
        RequestError: for a value out of range or a feature this engine does not have.
    """
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, Mapping):
        raise BodyError(f"sampling_params must be an object; got {type(raw).__name__}")
    for key in raw:
        if key not in _FIELDS:
            names = ", ".join(f"`{name}`" for name in _FIELDS)
            raise UnknownFieldError(f"unknown field `{key}`, expected one of {names}")
    given = {key: value for key, value in raw.items() if value is not None}
    for key in _UNSUPPORTED:
        if key in given:
            raise RequestError(f"{key} is not supported by the embedded engine.")
    return _build(given, vocab_size)


def _build(given: dict[str, Any], vocab_size: int) -> SamplingParams:
    temperature = _number(given, "temperature", 1.0)
    if temperature < 0:
        raise RequestError(f"temperature must be non-negative, got {temperature}.")
    is_greedy = temperature < GREEDY_BELOW
    max_new_tokens = _integer(given, "max_new_tokens", 128, low=0)
    top_k = _integer(given, "top_k", -1)
    if top_k < 1 and top_k != -1:
        raise RequestError(f"top_k must be -1 (disable), or at least 1, got {top_k}.")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        stop=_stop_strings(given),
        stop_token_ids=frozenset(_token_ids(given, "stop_token_ids", vocab_size)),
        temperature=1.0 if is_greedy else temperature,
        is_greedy=is_greedy,
        top_p=_in_range(given, "top_p", 1.0, "(0, 1]", lambda x: 0 < x <= 1),
        top_k=top_k if top_k < vocab_size else -1,
        min_p=_in_range(given, "min_p", 0.0, "[0, 1]", lambda x: 0 <= x <= 1),
        frequency_penalty=_in_range(
            given, "frequency_penalty", 0.0, "[-2, 2]", lambda x: -2 <= x <= 2
        ),
        presence_penalty=_in_range(
            given, "presence_penalty", 0.0, "[-2, 2]", lambda x: -2 <= x <= 2
        ),
        repetition_penalty=_in_range(
            given, "repetition_penalty", 1.0, "(0, 2]", lambda x: 0 < x <= 2
        ),
        min_new_tokens=_min_new_tokens(given, max_new_tokens),
        n=_integer(given, "n", 1, low=1, high=MAX_SAMPLES),
        ignore_eos=_boolean(given, "ignore_eos", False),
        skip_special_tokens=_boolean(given, "skip_special_tokens", True),
        spaces_between_special_tokens=_boolean(given, "spaces_between_special_tokens", True),
        no_stop_trim=_boolean(given, "no_stop_trim", False),
        stream_interval=_integer(given, "stream_interval", 1, low=1),
        logit_bias=_logit_bias(given, vocab_size),
        sampling_seed=_seed(given),
    )


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BodyError(f"{key} must be a number; got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{key} must be a finite number, got {value}.")
    return number


def _in_range(
    given: Mapping[str, Any], key: str, default: float, interval: str, holds: Any
) -> float:
    value = _number(given, key, default)
    if not holds(value):
        raise RequestError(f"{key} must be in {interval}, got {value}.")
    return value


def _integer(
    given: Mapping[str, Any], key: str, default: int, low: int | None = None, high: int = 2**31
) -> int:
    value = given.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BodyError(f"{key} must be an integer; got {type(value).__name__}")
    if low is not None and value < low:
        raise RequestError(f"{key} must be at least {low}, got {value}.")
    if value > high:
        raise RequestError(f"{key} must be at most {high}, got {value}.")
    return value


def _boolean(given: Mapping[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise BodyError(f"{key} must be a boolean; got {type(value).__name__}")
    return value


def _min_new_tokens(given: Mapping[str, Any], max_new_tokens: int) -> int:
    value = _integer(given, "min_new_tokens", 0)
    if not 0 <= value <= max_new_tokens:
        raise RequestError(f"min_new_tokens must be in [0, {max_new_tokens}], got {value}.")
    return value


def _stop_strings(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("stop", ())
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise BodyError("stop must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}.")
    return tuple(s for s in strings if s)


def _token_ids(given: Mapping[str, Any], key: str, vocab_size: int) -> list[int]:
    return check_token_ids(given.get(key, []), key, vocab_size)


def check_token_ids(value: object, name: str, vocab_size: int) -> list[int]:
    """`value` as a list of token ids of the vocabulary.

    Raises:
        BodyError: it is no list of integers.
        RequestError: an id is outside `[0, vocab_size)`.
    """
    if not isinstance(value, (list, tuple)):
        raise BodyError(f"{name} must be list or null; got {type(value).__name__}")
    for token in value:
        if type(token) is not int:
            raise BodyError(f"{name} must hold integers; got {type(token).__name__}")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} holds token id {token}, which is outside the vocabulary [0, {vocab_size})."
            )
    return list(value)


def _logit_bias(given: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    raw = given.get("logit_bias", {})
    if not isinstance(raw, Mapping):
        raise BodyError(f"logit_bias must be an object; got {type(raw).__name__}")
    bias: dict[int, float] = {}
    for key in raw:
        try:
            token = int(key)
        except ValueError:
            raise RequestError(
                f"logit_bias must have keys in [0, {vocab_size}), got {key}."
            ) from None
        if not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias must have keys in [0, {vocab_size}), got {token}.")
        bias[token] = _number(raw, key, 0.0)
    return tuple(bias.items())


def _seed(given: Mapping[str, Any]) -> int | None:
    if "sampling_seed" not in given:
        return None
    value = _integer(given, "sampling_seed", 0, high=2**63 - 1)
    if value < -(2**63):
        raise RequestError("sampling_seed must fit in 64 bits.")
    return value
