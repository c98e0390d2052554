"""Text of a run on its way to the page: always valid UTF-8, always of a bearable length.

Whether characters are harmless is not decided here: the page shows all text as text.
"""

from __future__ import annotations

import json
from typing import Any

MAX_TEXT = 200_000
MAX_MESSAGES = 200
PREVIEW = 160


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """`text` without lone surrogates, cut to `limit` characters with a note of what is missing."""
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text) - limit:,} more characters)"
    return text.encode("utf-8", "replace").decode()


def parse_json(text: str | None) -> Any:
    """The value of a JSON column; the text itself when it is not JSON."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def pretty(text: str | None) -> str:
    """A JSON column as text for people: strings bare, objects indented."""
    value = parse_json(text)
    if value is None:
        return ""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
    return clean(shown)


def messages(prompt_json: str | None) -> list[dict[str, str]]:
    """A prompt as messages with `role` and `text`; a plain text is one message of no role."""
    prompt = parse_json(prompt_json)
    if not isinstance(prompt, list):
        return [{"role": "", "text": pretty(prompt_json)}]
    return [_message(entry) for entry in prompt[:MAX_MESSAGES]]


def preview(text: str) -> str:
    """The beginning of `text` on one line."""
    cut = text[: 4 * PREVIEW].split()
    return clean(" ".join(cut)[:PREVIEW])


def prompt_preview(prompt_json: str | None) -> str:
    """The beginning of the last message."""
    shown = messages(prompt_json)
    return preview(shown[-1]["text"]) if shown else ""


def _message(entry: Any) -> dict[str, str]:
    if not isinstance(entry, dict):
        return {"role": "", "text": clean(str(entry))}
    content = entry.get("content", "")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    extra = {k: v for k, v in entry.items() if k not in ("role", "content")}
    if extra:
        text += ("\n" if text else "") + json.dumps(extra, ensure_ascii=False, indent=2)
    return {"role": clean(str(entry.get("role", "")), 100), "text": clean(text)}
