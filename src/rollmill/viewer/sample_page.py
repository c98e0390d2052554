"""One sample as the page shows it: its texts, its segments and its tokens with their figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.viewer.sample_files import safe_name, scalar_reward
from rollmill.viewer.texts import clean, messages, parse_json, pretty
from rollmill.viewer.tokenizer import RunTokenizer

TOKENS_PER_PAGE = 4096


def sample_page(
    entry: Mapping[str, Any],
    *,
    row: int,
    tokenizer: RunTokenizer,
    reward_key: str | None,
    trained: Mapping[str, Any] | None = None,
    first_token: int = 0,
    num_tokens: int = TOKENS_PER_PAGE,
) -> dict[str, Any]:
    """What the page shows of a row of a Parquet file.

    Args:
        entry: the row.
        row: its number.
        tokenizer: the run's.
        reward_key: which part is the reward when rewards have parts.
        trained: what the trainer wrote down about the sample, when it did.
        first_token: first response token to send; the prompt goes with the first ones.
        num_tokens: most response tokens to send.
    """
    decision = safe_name(entry.get("decision"))
    return {
        "row": row,
        "index": entry.get("index"),
        "group": entry.get("group_index"),
        "attempt": entry.get("attempt"),
        "status": safe_name(entry.get("status")),
        "failure": safe_name(entry.get("failure")),
        "reward": scalar_reward(entry, reward_key),
        "reward_parts": reward_parts(entry),
        "outcome": safe_name(entry.get("reward_outcome")),
        "detail": clean(entry.get("reward_detail") or "", 10_000),
        "in_loss": entry.get("in_loss", True) and not decision,
        "decision": decision,
        "reason": clean(entry.get("reason") or "", 10_000),
        "advantage": _finite((trained or {}).get("advantage")),
        "prompt": messages(entry.get("prompt_json")),
        "label": pretty(entry.get("label_json")),
        "metadata": _unless_empty(pretty(entry.get("metadata_json"))),
        "response": clean(entry.get("response") or ""),
        "timing": _numbers(parse_json(entry.get("timing_json"))),
        "counters": _numbers(entry.get("counters")),
        "segments": segment_page(entry.get("segments") or ()),
        "tokens": token_page(entry, tokenizer, trained or {}, first_token, num_tokens),
        "tokenizer_problem": tokenizer.problem,
    }


def segment_page(segments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The segments with the place where each begins in the response."""
    shown, start = [], 0
    for segment in segments:
        shown.append(
            {
                "start": start,
                "length": segment["length"],
                "source": segment["source"],
                "trainable": segment["trainable"],
                "version": segment["weight_version"],
                "has_log_probs": segment["has_log_probs"],
            }
        )
        start += segment["length"]
    return shown


def token_page(
    entry: Mapping[str, Any],
    tokenizer: RunTokenizer,
    trained: Mapping[str, Any],
    first: int,
    count: int,
) -> dict[str, Any]:
    """Response tokens `first` to `first + count` (and the prompt's, when `first` is 0)."""
    prompt = list(entry.get("prompt_tokens") or ())[-count:] if first == 0 else []
    response = list(entry.get("response_tokens") or ())
    window = slice(first, first + count)
    texts = tokenizer.texts(response[window])
    prompt_texts = tokenizer.texts(prompt)
    return {
        "first": first,
        "total": len(response),
        "ids": response[window],
        "texts": texts.texts,
        "special": texts.special,
        "log_probs": _values(entry.get("rollout_log_probs"), window),
        "trainer_log_probs": _values(_if_any(trained.get("trainer_log_probs")), window),
        "teacher_log_probs": _values(entry.get("teacher_log_probs"), window),
        "prompt": {
            "total": len(entry.get("prompt_tokens") or ()),
            "ids": prompt,
            "texts": prompt_texts.texts,
            "special": prompt_texts.special,
        },
    }


def reward_parts(entry: Mapping[str, Any]) -> dict[str, float | None]:
    """The named parts of a reward: its own, or those of a weighted sum in the metadata."""
    reward = parse_json(entry.get("reward_json"))
    metadata = parse_json(entry.get("metadata_json"))
    parts = reward if isinstance(reward, dict) else None
    if parts is None and isinstance(metadata, dict):
        parts = metadata.get("reward_parts")
    return _numbers(parts)


def _values(values: Sequence[float] | None, window: slice) -> list[float | None] | None:
    return None if values is None else [_finite(value) for value in values[window]]


def _if_any(values: Sequence[float] | None) -> Sequence[float] | None:
    """The values, or None when not one of them is a number."""
    is_known = values is not None and any(_finite(value) is not None for value in values)
    return values if is_known else None


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None


def _numbers(values: Any) -> dict[str, float | None]:
    if not isinstance(values, Mapping):
        return {}
    return {
        clean(str(name), 200): _finite(value)
        for name, value in values.items()
        if isinstance(value, int | float) or value is None
    }


def _unless_empty(text: str) -> str:
    return "" if text == "{}" else text
