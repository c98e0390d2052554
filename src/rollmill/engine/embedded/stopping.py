"""When a sequence ends.

A stop token or stop string wins over the length limit: an answer whose last allowed token is its
end is a finished answer.
"""

from __future__ import annotations

from typing import Any

from rollmill.engine.embedded.sequence import Sequence


class StopRules:
    """The model's end tokens and each request's own stops.

    Args:
        eos_ids: tokens that end every sequence unless it ignores them.
        tokenizer: decodes the tail that stop strings are looked for in; not shared with other
            threads. None: stop strings never match.
    """

    def __init__(self, eos_ids: frozenset[int], tokenizer: Any | None) -> None:
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer

    def check(self, sequence: Sequence) -> dict[str, Any] | None:
        """The finish reason after the newest token, or None."""
        params, token = sequence.params, sequence.output[-1]
        is_eos = token in self.eos_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            return {"type": "stop", "matched": token}
        matched = self._stop_string(sequence) if params.stop else None
        if matched is not None:
            sequence.stop_text = matched
            return {"type": "stop", "matched": matched}
        if len(sequence.output) >= params.max_new_tokens:
            return {"type": "length", "length": len(sequence.output)}
        return None

    def _stop_string(self, sequence: Sequence) -> str | None:
        if self._tokenizer is None:
            return None
        stops = sequence.params.stop
        # A token is a byte at least, so so many tokens surely cover the longest stop string.
        reach = max(len(stop.encode()) for stop in stops) + 8
        # Special tokens too, whatever the answer's text shows: "<|im_end|>" is a usual stop string.
        tail: str = self._tokenizer.decode(sequence.output[-reach:], skip_special_tokens=False)
        return next((stop for stop in stops if stop in tail), None)


def eos_token_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """End tokens named by the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, (list, tuple)):
            found.update(int(v) for v in value)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return frozenset(t for t in found if 0 <= t < vocab_size)
