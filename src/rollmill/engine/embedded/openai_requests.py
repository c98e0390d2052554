"""OpenAI's request bodies as `/generate` bodies.

OpenAI's names are translated, SGLang's extensions pass through, and what this engine cannot do is
refused rather than ignored.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from rollmill.engine.embedded.replies import field_of
from rollmill.engine.embedded.sampling import BodyError, RequestError
from rollmill.engine.embedded.state import ServerState
from rollmill.engine.embedded.tokens import need_tokenizer

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "regex",
    "ebnf",
)
_OTHER_NAME = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
_DEFAULT_COMPLETION_TOKENS = 16
_TEMPLATE_OPTIONS = ("tools", "documents")


def completion_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """`/v1/completions` as `/generate`.

    Raises:
        BodyError: wrong types.
        RequestError: an option that this engine does not have.
    """
    for name in ("suffix", "echo"):
        if body.get(name):
            raise RequestError(f"{name} is not supported by the embedded engine.")
    params = _sampling(body)
    params["max_new_tokens"] = _either(body.get("max_tokens"), _DEFAULT_COMPLETION_TOKENS)
    prompt = body.get("prompt")
    if prompt is None:
        raise BodyError("1 validation error: {'type': 'missing', 'loc': ('body', 'prompt')}")
    native = _native(dict(body), params)
    is_text = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str)
    )
    native["text" if is_text else "input_ids"] = prompt
    num_top = body.get("logprobs")
    if num_top is not None and num_top is not False:
        native |= {"return_logprob": True, "top_logprobs_num": num_top}
    return native


def chat_body(body: Mapping[str, Any], state: ServerState) -> dict[str, Any]:
    """`/v1/chat/completions` as `/generate`, the messages rendered by the chat template.

    Raises:
        BodyError: wrong types.
        RequestError: an option that this engine does not have, or messages that the template
            refuses.
    """
    if not isinstance(body.get("messages"), list):
        raise BodyError("1 validation error: {'type': 'list_type', 'loc': ('body', 'messages')}")
    input_ids = _render(dict(body), state)
    params = _sampling(body)
    room = _room(state, len(input_ids))
    wanted = _either(body.get("max_completion_tokens"), body.get("max_tokens"))
    params["max_new_tokens"] = _either(wanted, room)
    native = _native(dict(body), params)
    native["input_ids"] = input_ids
    if field_of(dict(body), "logprobs", bool, False):
        native |= {"return_logprob": True, "top_logprobs_num": body.get("top_logprobs")}
    return native


def _room(state: ServerState, prompt_tokens: int) -> int:
    """New tokens of a chat that names no limit: what the context and the KV cache allow."""
    fits = state.facts.fits
    sizes = range(1, state.facts.context_length - prompt_tokens + 1)
    return bisect.bisect_left(sizes, True, key=lambda size: not fits(prompt_tokens, size))


def _native(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    format_kind = (field_of(body, "response_format", dict, None) or {}).get("type", "text")
    if format_kind != "text":
        raise RequestError("response_format is not supported by the embedded engine.")
    return {
        "sampling_params": params,
        "stream": body.get("stream"),
        "rid": body.get("rid"),
        "lora_path": body.get("lora_path"),
        "return_hidden_states": body.get("return_hidden_states"),
    }


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    params = {key: body[key] for key in _SAME_NAME if body.get(key) is not None}
    params |= {ours: body[key] for key, ours in _OTHER_NAME.items() if body.get(key) is not None}
    return params


def _either(value: Any, default: Any) -> Any:
    return default if value is None else value


def _render(body: dict[str, Any], state: ServerState) -> list[int]:
    tokenizer = need_tokenizer(state)
    messages = [_plain_message(message) for message in body["messages"]]
    if not messages:
        raise RequestError("Messages cannot be empty.")
    options = dict(field_of(body, "chat_template_kwargs", dict, {}))
    options |= {key: body[key] for key in _TEMPLATE_OPTIONS if body.get(key) is not None}
    is_continued = field_of(body, "continue_final_message", bool, False)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
            **options,
        )
    except Exception as error:
        raise RequestError(f"The messages do not fit the chat template: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _plain_message(message: Any) -> dict[str, Any]:
    """A message whose content is a string, as chat templates of text models expect."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BodyError("every message must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RequestError("only text parts are supported in a message's content.")
        content = "".join(str(part) for part in parts)
    if content is not None and not isinstance(content, str):
        raise BodyError("a message's content must be a string or a list of parts")
    return message | {"content": content or ""}
