"""The reward of the extract-JSON example.

1 when the whole answer is exactly the gold object as JSON; otherwise half credit: 0.5 times the
share of right fields in the first `{…}` of the answer that is JSON; otherwise 0.
"""

from __future__ import annotations

import json
from typing import Any


def reward(sample: Any) -> float:
    """Judge `sample.response` against the gold object `sample.label`."""
    gold = sample.label
    answer = parse_object(sample.response)
    if answer is not None and is_same(answer, gold):
        return 1.0
    found = first_object(sample.response)
    if found is None:
        return 0.0
    num_right = sum(key in found and is_same(found[key], value) for key, value in gold.items())
    return 0.5 * num_right / len(gold)


def parse_object(text: str) -> dict[str, Any] | None:
    """The object that the whole text is, or None."""
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def first_object(text: str) -> dict[str, Any] | None:
    """The first `{…}` in the text that is a JSON object, or None."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    start = text.find("{")
    while start >= 0:
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
        else:
            return dict(value)
    return None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError when a key is there twice, so that no answer counts double."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def is_same(a: Any, b: Any) -> bool:
    """Equal in value and kind: 34 is neither "34" nor 34.0, and key order does not matter."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
