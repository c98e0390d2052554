"""From the JSON body of `/generate` to sequences, or to an error that says what is wrong."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollmill.engine.embedded.sampling import (
    BodyError,
    RequestError,
    SamplingParams,
    check_token_ids,
    parse_sampling_params,
)
from rollmill.engine.embedded.sequence import LogprobRequest, Sequence

_UNSUPPORTED = (
    "input_embeds",
    "lora_path",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_sampling_mask",
)
_MAX_TOP_LOGPROBS = 1000
_MASK = 2**64 - 1
_SAMPLE_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked against."""

    vocab_size: int
    context_length: int
    encode: Callable[[str], list[int]] | None
    """Text to token ids; None when there is no tokenizer."""
    next_seed: Callable[[], int]
    """Seeds of requests that bring none."""
    fits: Callable[[int, int], bool]
    """Whether (prompt tokens, new tokens) can ever fit in the KV cache."""
    has_experts: bool = False
    """Whether the model routes tokens to experts that can be reported."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked `/generate` request: its sequences in the order of the answer."""

    sequences: tuple[Sequence, ...]
    is_single: bool
    """Whether the answer is one object rather than a list."""
    stream: bool = False
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    is_incremental: bool = False
    """Whether a streamed chunk holds what is new rather than everything so far."""


def parse_generate(body: object, facts: ModelFacts) -> GenerateCall:
    """Check a `/generate` body. Unknown top-level keys are ignored, as SGLang does.

    Two keys are extensions: `incremental_streaming_output` (SGLang has a server flag of that name)
    and `sampling_offset` (SGLang counts random numbers from the start of the prompt).

    Raises:
        BodyError: wrong JSON types.
        RequestError: values that cannot be served.
    """
    if not isinstance(body, Mapping):
        raise BodyError("the body must be a JSON object")
    for key in _UNSUPPORTED:
        if _is_asked(body.get(key)):
            raise RequestError(f"{key} is not supported by the embedded engine.")
    stream = _boolean(body.get("stream"), "stream")
    prompts, is_batch = _prompts(body, facts)
    params = [
        parse_sampling_params(raw, facts.vocab_size)
        for raw in _per_prompt(body.get("sampling_params"), len(prompts), "sampling_params")
    ]
    logprobs = _logprob_requests(body, len(prompts), facts.vocab_size)
    num_samples = {p.n for p in params}
    if len(num_samples) > 1:
        raise RequestError("The parallel_sample_num should be the same for all sample params.")
    for prompt, param, wanted in zip(prompts, params, logprobs, strict=True):
        _check_size(prompt, param, wanted, facts)
    num = num_samples.pop()
    rids = _rids(body.get("rid"), len(prompts), num, is_batch)
    sequences = [
        _sequence(rids[i * num + j], prompts[i], params[i], logprobs[i], j, facts)
        for i in range(len(prompts))
        for j in range(num)
    ]
    for sequence in sequences:
        sequence.is_streamed = stream
        _take_extras(sequence, body, facts)
    return GenerateCall(
        sequences=tuple(sequences),
        is_single=not is_batch and num == 1,
        stream=stream,
        return_text_in_logprobs=_boolean(
            body.get("return_text_in_logprobs"), "return_text_in_logprobs"
        ),
        return_prompt_token_ids=_boolean(
            body.get("return_prompt_token_ids"), "return_prompt_token_ids"
        ),
        is_incremental=_boolean(
            body.get("incremental_streaming_output"), "incremental_streaming_output"
        ),
    )


def _take_extras(sequence: Sequence, body: Mapping[str, Any], facts: ModelFacts) -> None:
    """What one call asks of all its sequences, bounded by each one's prompt."""
    limit = len(sequence.prompt)
    offset = body.get("sampling_offset")
    sequence.sampling_offset = _count(offset, "sampling_offset", 0, 0, limit)
    if _boolean(body.get("return_routed_experts"), "return_routed_experts"):
        start = body.get("routed_experts_start_len")
        sequence.experts_start = _count(start, "routed_experts_start_len", 0, 0, limit)
        sequence.experts = [] if facts.has_experts else None


def _sequence(
    rid: str,
    prompt: list[int],
    params: SamplingParams,
    logprobs: LogprobRequest,
    sample: int,
    facts: ModelFacts,
) -> Sequence:
    seed = params.sampling_seed if params.sampling_seed is not None else facts.next_seed()
    # The samples of one request must differ, also when it brings a seed.
    seed = (seed + sample * _SAMPLE_STEP) & _MASK
    return Sequence(rid, prompt, replace(params, n=1), logprobs, seed)


def _is_asked(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(item is not None and item is not False and item != "" for item in items)


def _boolean(value: object, name: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BodyError(f"{name} must be a boolean; got {type(value).__name__}")
    return value


def _prompts(body: Mapping[str, Any], facts: ModelFacts) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether they came as a batch."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise RequestError("Either text, input_ids or input_embeds should be provided.")
    if ids is not None and text is not None:
        raise RequestError("Only one of text, input_ids and input_embeds may be provided.")
    if text is not None:
        return _encode_prompts(text, facts)
    if not isinstance(ids, list):
        raise BodyError(f"input_ids must be list or null; got {type(ids).__name__}")
    is_batch = bool(ids) and isinstance(ids[0], list)
    prompts = [
        check_token_ids(one, "input_ids", facts.vocab_size) for one in (ids if is_batch else [ids])
    ]
    if not all(prompts):
        raise RequestError("input_ids cannot be empty.")
    return prompts, is_batch


def _encode_prompts(text: object, facts: ModelFacts) -> tuple[list[list[int]], bool]:
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
        raise BodyError("text must be a string or a list of strings")
    if facts.encode is None:
        raise RequestError("The engine has no tokenizer; please provide input_ids.")
    if not texts:
        raise RequestError("text cannot be empty.")
    prompts = [facts.encode(t) for t in texts]
    if not all(prompts):
        raise RequestError("text has no tokens.")
    # A tokenizer may know tokens that the model has no row for.
    return [check_token_ids(p, "text", facts.vocab_size) for p in prompts], isinstance(text, list)


def _per_prompt(value: Any, count: int, name: str) -> list[Any]:
    """One value per prompt; a single one is shared."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} must hold one entry per prompt: {count}, got {len(value)}.")
    return value


def _logprob_requests(body: Mapping[str, Any], count: int, vocab_size: int) -> list[LogprobRequest]:
    wanted = _per_prompt(body.get("return_logprob"), count, "return_logprob")
    starts = _per_prompt(body.get("logprob_start_len"), count, "logprob_start_len")
    tops = _per_prompt(body.get("top_logprobs_num"), count, "top_logprobs_num")
    raw_ids = body.get("token_ids_logprob")
    is_nested = isinstance(raw_ids, list) and bool(raw_ids) and not isinstance(raw_ids[0], int)
    ids = _per_prompt(raw_ids, count, "token_ids_logprob") if is_nested else [raw_ids] * count
    requests = []
    for is_wanted, start, top, tokens in zip(wanted, starts, tops, ids, strict=True):
        if not _boolean(is_wanted, "return_logprob"):
            requests.append(LogprobRequest())
            continue
        requests.append(
            LogprobRequest(
                is_wanted=True,
                start_len=_count(start, "logprob_start_len", -1, -1, 2**31),
                num_top=_count(top, "top_logprobs_num", 0, 0, _MAX_TOP_LOGPROBS),
                token_ids=tuple(check_token_ids(tokens or [], "token_ids_logprob", vocab_size)),
            )
        )
    return requests


def _count(value: object, name: str, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if type(value) is not int:
        raise BodyError(f"{name} must be an integer; got {type(value).__name__}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}.")
    return value


def _check_size(
    prompt: list[int], params: SamplingParams, logprobs: LogprobRequest, facts: ModelFacts
) -> None:
    length, limit, new = len(prompt), facts.context_length, params.max_new_tokens
    if length >= limit:
        raise RequestError(
            f"The input ({length} tokens) is longer than the model's context length "
            f"({limit} tokens)."
        )
    if length + new > limit:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
            f"You requested a total of {length + new} tokens: {length} tokens from the input "
            f"messages and {new} tokens for the completion. Please reduce the number of tokens "
            "in the input messages or the completion to fit within the limit."
        )
    if not facts.fits(length, new):
        raise RequestError(
            f"{length} prompt and {new} new tokens do not fit in the engine's KV cache; "
            "raise max_total_tokens or ask for less."
        )
    if logprobs.start_len >= length:
        raise RequestError(
            f"logprob_start_len ({logprobs.start_len}) must be less than the number of input "
            f"tokens ({length})."
        )


def _rids(value: object, num_prompts: int, num_samples: int, is_batch: bool) -> list[str]:
    """One id per sequence. With several samples per prompt given ids are not used (as SGLang)."""
    count = num_prompts * num_samples
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    given = _given_rids(value, num_prompts, is_batch)
    twice = sorted(rid for rid, times in Counter(given).items() if times > 1)
    if twice:
        raise RequestError(f"Duplicate request IDs detected within the request: {twice}")
    return given if num_samples == 1 else [uuid.uuid4().hex for _ in range(count)]


def _given_rids(value: object, num_prompts: int, is_batch: bool) -> list[str]:
    if isinstance(value, str):
        return [f"{value}_{i}" for i in range(num_prompts)] if is_batch else [value]
    if not isinstance(value, list) or not all(isinstance(rid, str) for rid in value):
        raise BodyError("rid must be a string or a list of strings")
    if len(value) != num_prompts:
        raise RequestError(
            f"The length of rid ({len(value)}) must be the number of prompts ({num_prompts})."
        )
    return list(value)
