"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollmill.engine.embedded.replies import field_of, json_reply, read_body
from rollmill.engine.embedded.sampling import BodyError, RequestError, check_token_ids
from rollmill.engine.embedded.state import STATE, ServerState


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize {prompt}: token ids of one text or of a list of texts."""
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    prompt = body.get("prompt")
    special = field_of(body, "add_special_tokens", bool, True)
    tokenizer = need_tokenizer(state)
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts):
        raise BodyError("prompt must be a string or a list of strings")
    ids = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    counts = [len(one) for one in ids]
    is_list = isinstance(prompt, list)
    return json_reply(
        {
            "tokens": ids if is_list else ids[0],
            "count": counts if is_list else counts[0],
            "max_model_len": state.facts.context_length,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize {tokens}: text of one list of ids or of a list of lists."""
    state = request.app[STATE]
    body = await read_body(request, is_required=True)
    tokens = field_of(body, "tokens", list, [])
    skip = field_of(body, "skip_special_tokens", bool, True)
    tokenizer = need_tokenizer(state)
    is_list = bool(tokens) and isinstance(tokens[0], list)
    lists = [
        check_token_ids(one, "tokens", state.facts.vocab_size)
        for one in (tokens if is_list else [tokens])
    ]
    texts = [tokenizer.decode(one, skip_special_tokens=skip) for one in lists]
    return json_reply({"text": texts if is_list else texts[0]})


def need_tokenizer(state: ServerState) -> Any:
    """The tokenizer.

    Raises:
        RequestError: the engine has none.
    """
    if state.tokenizer is None:
        raise RequestError("The engine has no tokenizer; please use /generate with input_ids.")
    return state.tokenizer
